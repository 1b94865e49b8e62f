"""What the codec, micro-batches and their automatic choice bring, by bandwidth and round trip.

Three paced stages and a client, each in a host of its own, joined by an emulated network with
real TCP (cubic on every route). E1 has no limits; E2 to E5 are the paper's, by the time of
the wire over that of a stage (0.17, 0.6, 1.1, 6.5), each with several round trips; E6 joins
three sites, with rates and round trips of their own. Settings, all greedy on the server head:

- `baseline`: the whole batch, raw rows; `+codec`: split rows; `+micro-batches`: four of them;
  `+both`;
- `auto`: servers choose the codec by what they measure of each link, clients the micro-batches.

Each codec has a swarm of its own beside the others, of which one works at a time
(`benchmarks/shaped/swarms.py`). All settings take turns within a round. Prints tokens/s of
decoding after the first token, the ratio to the baseline of the same round with its 95 %
interval, the share of the bound (how busy the busiest of stages, links and cores was), raw
bytes a token and hop and those that travelled, and what auto lost against the best fixed
setting. Rows decode as many tokens as take the baseline `--budget-s`, at most `--new`.

    python -m benchmarks.bandwidth [--quick] [--environments E1 E5] [--rtt-ms 0 80] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.emulation.network import missing
from benchmarks.shaped.analysis import paired, regret
from benchmarks.shaped.environments import PAPER_RATIOS, chosen, step_s, tokens_for
from benchmarks.shaped.swarms import AUTO, FIXED, Bench, Setting, Setup
from benchmarks.worker import agreeing
from bloombee.config.fields import CodecName
from bloombee.config.networks import read_network

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.shaped.analysis import Regret
    from benchmarks.shaped.environments import Environment
    from benchmarks.shaped.swarms import Run

TARGET_REGRET = 0.03
TARGET_BOTH, TARGET_RATIO = 3.0, 6.5
SETTLE_S = 4.0
console = Console(width=150)


@dataclass(frozen=True)
class Cell:
    """All runs in one environment: `rounds[round][setting]`."""

    environment: Environment
    rounds: list[list[Run]]
    took_s: float

    def speeds(self, setting: str) -> list[float]:
        """Tokens/s of a setting, by round."""
        return [r.tokens_per_s for row in self.rounds for r in row if r.setting.name == setting]

    @property
    def names(self) -> list[str]:
        """The settings, in their order."""
        return [run.setting.name for run in self.rounds[0]]

    @property
    def regret(self) -> Regret | None:
        """What auto lost; None without it, or without anything beside it."""
        fixed = {name: self.speeds(name) for name in self.names if name != AUTO.name}
        if AUTO.name not in self.names or not fixed:
            return None
        return regret(fixed, self.speeds(AUTO.name))


def measure(
    bench: Bench, environment: Environment, settings: Sequence[Setting], options: Any
) -> Cell:
    """All rounds of one environment."""
    began = time.perf_counter()
    bench.shape(environment)
    one_step_s = step_s(environment, bench.stage_s, len(bench.setup.spans))
    new = tokens_for(options.budget_s, one_step_s, options.new)
    if AUTO in settings:
        bench.settle(AUTO, options.settle_s)
    rounds = [[bench.run(setting, new) for setting in settings] for _ in range(options.rounds)]
    return Cell(environment, rounds, time.perf_counter() - began)


def report(cell: Cell, bench: Bench) -> None:
    """The table of one environment."""
    rates = " ".join(
        "unshaped" if rate is None else f"{rate:.2f}"
        for rate in (bench.rate(wire) for wire in cell.environment.hops)
    )
    title = f"{cell.environment.name}: Mbit/s of the hops {rates}"
    table = Table(
        "setting", "tokens/s", "x baseline", "of bound", "busiest", "busy %", "B/token and hop",
        "cores", title=title, title_justify="left",
    )  # fmt: skip
    raw = bench.setup.hop_bytes // bench.setup.batch
    for index, name in enumerate(cell.names):
        runs = [row[index] for row in cell.rounds]
        busy = [median(r.figures.busy[part] for r in runs) for part in runs[0].figures.busy]
        table.add_row(
            name,
            f"{median(cell.speeds(name)):.1f}",
            str(paired(cell.speeds(name), cell.speeds(cell.names[0]))),
            f"{100 * median(r.figures.of_bound for r in runs):.0f} %",
            runs[0].figures.bottleneck,
            " ".join(f"{100 * share:.0f}" for share in busy),
            f"{raw} raw: {' '.join(str(each) for each in runs[0].row_bytes)}",
            f"{median(r.cores for r in runs):.2f}",
        )
    console.print(table)
    answers = [run.answer.ids for run in cell.rounds[0]]
    pairs = [agreeing(ids, answers[0]) for ids in answers]
    same, total = (sum(each) for each in zip(*pairs, strict=True))
    rows = len(answers[0][0])
    console.print(
        f"{same} of {total} tokens equal those of {cell.names[0]} up to each row's first "
        f"difference; {rows} a row; {_lost(cell)}took {cell.took_s:.0f} s\n"
    )


def _lost(cell: Cell) -> str:
    found = cell.regret
    if found is None:
        return ""
    interval = (
        "" if len(cell.rounds) == 1 else f" ({100 * found.low:.1f} to {100 * found.high:.1f})"
    )
    return f"auto lost {100 * found.share:.1f} %{interval} against {found.best}; "


def conclude(cells: Sequence[Cell]) -> None:
    """What the targets say of all cells."""
    found = [(cell.environment.name, cell.regret) for cell in cells]
    losses = [(name, each) for name, each in found if each is not None]
    missed = [name for name, each in losses if not each.meets(TARGET_REGRET)]
    if losses:
        worst = max(losses, key=lambda each: each[1].share)
        console.print(
            f"auto: {len(losses) - len(missed)} of {len(losses)} environments within "
            f"{TARGET_REGRET:.0%} of the best fixed setting; worst {100 * worst[1].share:.1f} % "
            f"in {worst[0]}" + (f"; missed: {', '.join(missed)}" if missed else "")
        )
    for cell in cells:
        both = {"baseline", "+both"} <= set(cell.names)
        if both and cell.environment.slowest == TARGET_RATIO:
            ratio = paired(cell.speeds("+both"), cell.speeds("baseline"))
            met = "met" if ratio.high >= TARGET_BOTH and ratio.median >= 1 else "missed"
            if ratio.pairs == 1:
                met = "met" if ratio.median >= TARGET_BOTH else "missed"
            console.print(
                f"{cell.environment.name}: both together {ratio} x the baseline; "
                f"target {TARGET_BOTH}: {met}"
            )


def as_json(cells: Sequence[Cell], bench: Bench) -> bytes:
    """All figures, without the tokens."""
    found = [
        {
            "environment": cell.environment.name,
            "hops": [
                {"ratio": wire.ratio, "rtt_ms": wire.rtt_ms, "mbps": bench.rate(wire)}
                for wire in cell.environment.hops
            ],
            "took_s": cell.took_s,
            "regret": cell.regret,
            "runs": [
                {
                    "round": number,
                    "setting": run.setting,
                    "figures": run.figures,
                    "row_bytes": run.row_bytes,
                    "cores": run.cores,
                }
                for number, row in enumerate(cell.rounds)
                for run in row
            ],
        }
        for cell in cells
    ]
    told = {"setup": bench.setup, "stage_s": bench.stage_s, "cells": found}
    return msgspec.json.format(msgspec.json.encode(told))


def draw(cells: Sequence[Cell], file: Path) -> None:
    """A panel for each round trip, as in the paper's figures 8, 10 and 11."""
    from benchmarks.shaped.figure import draw_bars

    panels: dict[str, dict[str, dict[str, float]]] = {}
    for cell in cells:
        group, _, panel = cell.environment.name.partition(", ")
        speeds = {name: median(cell.speeds(name)) for name in cell.names}
        panels.setdefault(panel, {})[group] = speeds
    draw_bars(panels, file)
    console.print(f"drawn: {file}")


def main() -> int:
    """Run all cells and print."""
    options = _options()
    if reason := missing():
        console.print(f"left out: {reason}")
        return 0
    settings = _settings(options.settings)
    setup = Setup(options.model, tuple(options.spans), options.batch, options.prompt, options.pace)
    environments = chosen(options.environments, options.rtt_ms, read_network("e6"))
    cells: list[Cell] = []
    began = time.perf_counter()
    with ExitStack() as stack:
        bench = Bench(setup, sorted({s.codec for s in settings}), stack)
        bench.warm_up(settings)
        console.print(
            f"a stage alone, batch {setup.batch}, paced {setup.pace:g} x: "
            f"{1e3 * bench.stage_s:.1f} ms; a hop: {setup.hop_bytes:,} raw bytes; "
            f"up after {time.perf_counter() - began:.0f} s"
        )
        for environment in environments:
            cells.append(measure(bench, environment, settings, options))
            report(cells[-1], bench)
            if options.json:
                options.json.write_bytes(as_json(cells, bench))
        conclude(cells)
        if options.picture:
            draw(cells, options.picture)
    console.print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def _settings(names: Sequence[str]) -> list[Setting]:
    found = [setting for setting in (*FIXED, AUTO) if setting.name in names]
    if AUTO in found and AUTO.codec not in get_args(CodecName):
        console.print("auto is left out: servers have no --codec auto")
        found.remove(AUTO)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [setting.name for setting in (*FIXED, AUTO)]
    places = [*PAPER_RATIOS, "E6"]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--environments", nargs="+", choices=places, default=places, metavar="E")
    parser.add_argument("--rtt-ms", type=float, nargs="+", help="0 20 80, or with --quick 0")
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--spans", nargs=3, default=["0:12", "12:23", "23:30"],
        help="the head of SmolLM2 costs the last stage as much as four of its 30 blocks",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--prompt", type=int, default=129,
        help="tokens; servers keep whole pieces of 64, and at least the last token is computed",
    )  # fmt: skip
    parser.add_argument("--new", type=int, default=128, help="most tokens of a row")
    parser.add_argument("--budget-s", type=float, default=9.0, help="of a run of the baseline")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="of auto, unmeasured")
    parser.add_argument("--pace", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, help="3, or with --quick 1")
    parser.add_argument("--quick", action="store_true", help="one round of shorter runs")
    parser.add_argument("--picture", type=Path, help="file for a bar chart (PNG)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.quick:
        options.budget_s = 5.0
    options.rounds = options.rounds or (1 if options.quick else 3)
    if options.rtt_ms is None:
        options.rtt_ms = [0.0] if options.quick else [0.0, 20.0, 80.0]
    return options


if __name__ == "__main__":
    sys.exit(main())
