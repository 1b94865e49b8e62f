"""A link that gets slow in the middle of a run, and fast again: does the choice follow it?

Three paced stages and a client in hosts of their own (as in `benchmarks/bandwidth.py`). A batch
decodes; after a while the link from the first stage to the second drops to a 25th of its rate,
and later it comes back. Prints tokens/s second by second for `auto` (servers choose the codec,
the client the micro-batches) and for each fixed setting, what each keeps up in every phase once
it is steady, and how long after each change `auto` was within a tenth of the fixed setting
that is right there, for good. Target: 10 s.

A window of `--window-s` has to carry nine tenths of what the right setting carries in the
second half of the phase. All settings take turns; each runs alone.

    python -m benchmarks.link_drop [--quick] [--rtt-ms 20] [--rounds 1] [--picture drop.png]

At these rates raw rows never pay, so what auto has to notice is when the link comes back, if
at all; `--ratio 0 --to-ratio 6.5` starts without a limit, where raw is right, and drops to E5.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.emulation.network import missing
from benchmarks.shaped.analysis import per_second, settled_after
from benchmarks.shaped.environments import Wire, uniform
from benchmarks.shaped.swarms import AUTO, FIXED, Bench, Setting, Setup
from bloombee.config.fields import CodecName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pipelined.client import Answer, First

SPANS = ("0:12", "12:23", "23:30")
FROM, TO = 1, 2
"""The places of the first two stages: what lies between them changes."""
TARGET_S, SHARE = 10.0, 0.9
MARGIN_S = 3.0
MOST_TOKENS = 1024
console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: what the link is, and when, in seconds since all rows decode."""

    name: str
    ratio: float
    start_s: float
    end_s: float

    @property
    def second_half(self) -> tuple[float, float]:
        """Where a setting that chooses nothing is steady."""
        return (self.start_s + self.end_s) / 2, self.end_s


@dataclass(frozen=True)
class Drop:
    """One run: when tokens came, in seconds since all rows decode."""

    setting: Setting
    times_s: list[float]

    def kept_up(self, phase: Phase) -> float:
        """Tokens/s in the second half of a phase."""
        start_s, end_s = phase.second_half
        return sum(start_s <= at < end_s for at in self.times_s) / (end_s - start_s)


def phases(lengths_s: Sequence[float], ratio: float, dropped: float) -> list[Phase]:
    """Fast, slow, fast again."""
    ends = [sum(lengths_s[: i + 1]) for i in range(len(lengths_s))]
    names, ratios = ("before", "dropped", "back"), (ratio, dropped, ratio)
    starts = [0.0, *ends[:-1]]
    return [Phase(*each) for each in zip(names, ratios, starts, ends, strict=True)]


def run(bench: Bench, setting: Setting, plan: Sequence[Phase], rtt_ms: float) -> Drop:
    """A run through all phases."""
    lane, never = bench.lanes[setting.codec], threading.Event()
    began: list[float] = []

    def change(first: First) -> None:
        began.append(first.first_s)
        for phase in plan:
            never.wait(max(0.0, first.first_s + phase.start_s - time.perf_counter()))
            bench.shape_pair(lane, FROM, TO, Wire(phase.ratio, rtt_ms))

    seconds = plan[-1].end_s + MARGIN_S
    answer: Answer = lane.ask(lane.request(setting.groups, MOST_TOKENS, seconds), change)
    times_s = sorted(at - began[0] for row in answer.times_s for at in row)
    return Drop(setting, times_s)


def report(rounds: list[list[Drop]], plan: Sequence[Phase]) -> None:
    """What every setting kept up, and when auto had found the right one."""
    table = Table("setting", *(f"{phase.name}: tokens/s" for phase in plan), title="once steady")
    for index, drop in enumerate(rounds[0]):
        speeds = [median(row[index].kept_up(phase) for row in rounds) for phase in plan]
        table.add_row(drop.setting.name, *(f"{speed:.1f}" for speed in speeds))
    console.print(table)
    for drop in rounds[0]:
        speeds = per_second(drop.times_s, 0.0, plan[-1].end_s)
        console.print(f"{drop.setting.name:>14}, by the second:", *(f"{s:.0f}" for s in speeds))


@dataclass(frozen=True, slots=True)
class Found:
    """How long after a change auto was within a tenth of the right setting; None: never."""

    phase: str
    right: str
    needed: float
    after_s: tuple[float | None, ...]


def follow(rounds: list[list[Drop]], plan: Sequence[Phase], window_s: float) -> list[Found]:
    """Each change, in all rounds; nothing without auto, or without a fixed setting."""
    fixed = [[drop for drop in row if drop.setting != AUTO] for row in rounds]
    autos = [drop for row in rounds for drop in row if drop.setting == AUTO]
    if not autos or not fixed[0]:
        return []
    found: list[Found] = []
    for phase in plan[1:]:
        kept = [median(row[i].kept_up(phase) for row in fixed) for i in range(len(fixed[0]))]
        best, span = max(kept), (phase.start_s, phase.end_s)
        after = [settled_after(drop.times_s, span, SHARE * best, window_s) for drop in autos]
        right = fixed[0][kept.index(best)].setting.name
        found.append(Found(phase.name, right, SHARE * best, tuple(after)))
    return found


def conclude(found: Sequence[Found]) -> None:
    """One line a change."""
    for each in found:
        told = ", ".join("never" if s is None else f"{s:.1f} s" for s in each.after_s)
        met = all(s is not None and s <= TARGET_S for s in each.after_s)
        console.print(
            f"{each.phase}: auto within 10 % of the right fixed setting ({each.right}, at least "
            f"{each.needed:.1f} tokens/s) after {told}; target {TARGET_S:.0f} s: "
            f"{'met' if met else 'missed'}"
        )


def main() -> int:
    """Run and print."""
    options = _options()
    if reason := missing():
        console.print(f"left out: {reason}")
        return 0
    settings = [setting for setting in (*FIXED, AUTO) if setting.name in options.settings]
    if AUTO in settings and AUTO.codec not in get_args(CodecName):
        console.print("auto is left out: servers have no --codec auto")
        settings.remove(AUTO)
    dropped = options.to_ratio or options.ratio * options.factor
    plan = phases(options.phases_s, options.ratio, dropped)
    setup = Setup(options.model, SPANS, options.batch, options.prompt, options.pace)
    with ExitStack() as stack:
        bench = Bench(setup, sorted({setting.codec for setting in settings}), stack)
        bench.warm_up(settings)
        bench.shape(uniform("all", options.ratio, options.rtt_ms, len(SPANS)))
        rates = [bench.rate(Wire(phase.ratio, options.rtt_ms)) for phase in plan]
        told = ("no limit" if rate is None else f"{rate:.2f} Mbit/s" for rate in rates)
        console.print("the link:", ", ".join(told))
        rounds: list[list[Drop]] = []
        for _ in range(options.rounds):
            if AUTO in settings:
                bench.settle(AUTO, options.settle_s)
            rounds.append([run(bench, each, plan, options.rtt_ms) for each in settings])
    report(rounds, plan)
    found = follow(rounds, plan, options.window_s)
    conclude(found)
    _write(rounds, plan, found, options)
    return 0


def _write(
    rounds: list[list[Drop]],
    plan: Sequence[Phase],
    found: Sequence[Found],
    options: argparse.Namespace,
) -> None:
    if options.json:
        told = {"phases": plan, "found": found, "rounds": rounds}
        options.json.write_bytes(msgspec.json.encode(told))
    if options.picture:
        from benchmarks.shaped.figure import draw_curves

        curves = {
            drop.setting.name: per_second(drop.times_s, 0.0, plan[-1].end_s, 2.0)
            for drop in rounds[0]
        }
        draw_curves(curves, [phase.start_s for phase in plan[1:]], 2.0, options.picture)
        console.print(f"drawn: {options.picture}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [setting.name for setting in (*FIXED, AUTO)]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--ratio", type=float, default=0.26, help="of all links; E5's over 25")
    parser.add_argument("--factor", type=float, default=25.0, help="by which the link drops")
    parser.add_argument("--to-ratio", type=float, help="of the link once dropped, instead")
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument(
        "--phases-s", type=float, nargs=3, default=[10.0, 25.0, 20.0],
        help="before the drop, dropped, and back",
    )  # fmt: skip
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=129)
    parser.add_argument("--pace", type=float, default=4.0)
    parser.add_argument("--settle-s", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="shorter phases, one round")
    parser.add_argument("--picture", type=Path, help="file for the curves (PNG)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.phases_s = 1, [6.0, 16.0, 14.0]
    return options


if __name__ == "__main__":
    sys.exit(main())
