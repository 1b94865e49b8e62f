"""Where the time of a decode step goes, in the paper's environments, with and without overlap.

Three paced stages and a client in hosts of their own, joined by an emulated network, as in
`benchmarks/bandwidth.py`, which has the environments (by the time of the wire over that of a
stage). Settings, all greedy on the server head: the whole batch or four micro-batches that
wait for nobody, each with raw rows and with the codec. After each run the client asks the
stages what their books say of its sessions (`bloombee-status --trace` shows the same), so what is
printed is measured by the servers themselves, always, not by a profiler.

Prints for each environment and setting a table in the manner of the paper's figure 1 and tables
6 to 8: per stage and mean step the wire, how much of it the device had nothing else to do
(exposed), codec, queue, device-host copies, and computing. `nobody computes`
is the share of the time of decoding in which no device worked, whatever it waited for: what of
all communication nothing hides. Then the time from network card to card of a full-batch hop, raw
and coded, beside the paper's, and how far that is from bytes over rate.

    python -m benchmarks.breakdown [--quick] [--environments E1 E5] [--rtt-ms 0] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.emulation.network import missing
from benchmarks.pipelined.analysis import steady
from benchmarks.shaped.environments import PAPER_RATIOS, step_s, tokens_for, uniform
from benchmarks.shaped.swarms import FIXED, Bench, Run, Setting, Setup
from bloombee.cli.status_traces import PhaseTrace, Told, traces_of, traces_shown
from bloombee.cli.trace_figure import draw_traces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.shaped.environments import Environment

PAPER_NIC_MS = {"E1": (4, 4), "E2": (7, 7), "E3": (25, 19), "E4": (45, 39), "E5": (269, 217)}
"""Section 8.5: card to card, raw and compressed."""
console = Console(width=150)


@dataclass(frozen=True)
class Cell:
    """One setting in one environment: all its rounds, put together."""

    environment: Environment
    setting: str
    tokens_per_s: float
    nobody: float
    trace: PhaseTrace

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.environment.name}, {self.setting}"

    @property
    def hop_ms(self) -> float:
        """From the first stage to the second."""
        return self.trace.stages[1].wire_ms


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """How much time lies in any of the intervals."""
    total_s, until_s = 0.0, 0.0
    for start_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def nobody_computes(bench: Bench, run: Run, first_s: float) -> float:
    """The share of a run's steady time in which no stage computed."""
    window = steady(run.answer, first_s)
    passes = [p for stage in bench.lanes[run.setting.codec].passes() for p in stage]
    inside = [
        (max(p.started_us / 1e6, window.start_s), min(p.ended_us / 1e6, window.end_s))
        for p in passes
        if window.overlap_s(p.started_us / 1e6, p.ended_us / 1e6) > 0
    ]
    return 1 - covered_s(inside) / window.length_s


def measure(bench: Bench, environment: Environment, options: argparse.Namespace) -> list[Cell]:
    """All settings in one environment, which take turns."""
    bench.shape(environment)
    one_step_s = step_s(environment, bench.stage_s, len(bench.setup.spans))
    new = tokens_for(options.budget_s, one_step_s, options.new)
    settings = _settings(options)
    rounds = [[bench.run(setting, new) for setting in settings] for _ in range(options.rounds)]
    return [_cell(bench, environment, list(runs)) for runs in zip(*rounds, strict=True)]


def _settings(options: argparse.Namespace) -> list[Setting]:
    return [setting for setting in FIXED if setting.name in options.settings]


def _cell(bench: Bench, environment: Environment, runs: Sequence[Run]) -> Cell:
    told = [
        Told(f"stage {number}", report)
        for run in runs
        for number, stage in enumerate(run.answer.traces)
        for report in stage
        if report.phase == "decode"
    ]
    (trace,) = traces_of(told)
    firsts = [max(times[0] for times in run.answer.times_s) for run in runs]
    nobody = [nobody_computes(bench, run, at) for run, at in zip(runs, firsts, strict=True)]
    speed = median(run.tokens_per_s for run in runs)
    return Cell(environment, runs[0].setting.name, speed, median(nobody), trace)


def report(cells: Sequence[Cell]) -> None:
    """The tables of one environment."""
    base = cells[0].tokens_per_s
    for cell in cells:
        console.print(
            f"[bold]{cell.name}[/bold]: {cell.tokens_per_s:.1f} tokens/s "
            f"({cell.tokens_per_s / base:.2f} x {cells[0].setting}); "
            f"nobody computes {100 * cell.nobody:.0f} % of the time"
        )
        console.print(traces_shown([cell.trace]))


def hops(cells: Sequence[Cell], bench: Bench) -> Table:
    """Card to card, raw and coded, of the whole batch."""
    table = Table(
        "environment", "Mbit/s", "raw ms", "bytes/rate ms", "coded ms", "coded/raw",
        "codec ms", "paper raw -> coded ms (ratio)",
        title="a full-batch hop from card to card (first to second stage)", title_justify="left",
    )  # fmt: skip
    named = {(cell.environment.name, cell.setting): cell for cell in cells}
    for name in dict.fromkeys(cell.environment.name for cell in cells):
        if not {(name, "baseline"), (name, "+codec")} <= named.keys():
            continue
        raw, coded = named[name, "baseline"], named[name, "+codec"]
        wire = raw.environment.hops[0]
        rate = bench.rate(wire)
        first, second = coded.trace.stages[:2]
        paper = PAPER_NIC_MS.get(name.split(",")[0])
        table.add_row(
            name,
            "unshaped" if rate is None else f"{rate:.2f}",
            f"{raw.hop_ms:.1f}",
            "-" if rate is None else f"{wire.rtt_ms / 2 + raw_ms(raw, rate):.1f}",
            f"{coded.hop_ms:.1f}",
            f"{coded.hop_ms / raw.hop_ms:.2f}",
            f"{first.encode_ms:.2f} + {second.decode_ms:.2f}",
            "" if paper is None else f"{paper[0]} -> {paper[1]} ({paper[1] / paper[0]:.2f})",
        )
    return table


def raw_ms(cell: Cell, rate_mbps: float) -> float:
    """What its payload takes at that rate, nothing else counted."""
    return cell.trace.stages[0].bytes_out * 8 / rate_mbps / 1e3


def main() -> int:
    """Run all environments and print."""
    options = _options()
    if reason := missing():
        console.print(f"left out: {reason}")
        return 0
    setup = Setup(
        options.model, tuple(options.spans), options.batch, options.prompt, options.pace, trace=True
    )
    cells: list[Cell] = []
    began = time.perf_counter()
    with ExitStack() as stack:
        settings = _settings(options)
        bench = Bench(setup, sorted({setting.codec for setting in settings}), stack)
        bench.warm_up(settings)
        console.print(
            f"a stage alone, batch {setup.batch}, paced {setup.pace:g} x: "
            f"{1e3 * bench.stage_s:.1f} ms; a hop: {setup.hop_bytes:,} raw bytes\n"
        )
        for name in options.environments:
            environment = uniform(name, PAPER_RATIOS[name], options.rtt_ms, len(setup.spans))
            cells += (found := measure(bench, environment, options))
            report(found)
        console.print(hops(cells, bench))
    if options.picture:
        draw_traces({cell.name: cell.trace for cell in cells}, options.picture)
        console.print(f"drawn: {options.picture}")
    if options.json:
        told = [{**asdict(cell), "environment": cell.environment.name} for cell in cells]
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told)))
    console.print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--environments", nargs="+", choices=list(PAPER_RATIOS), metavar="E",
        help="E1 to E5; with --quick E1 and E5",
    )  # fmt: skip
    parser.add_argument("--rtt-ms", type=float, default=0.0)
    names = [setting.name for setting in FIXED]
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--spans", nargs=3, default=["0:12", "12:23", "23:30"],
        help="the head of SmolLM2 costs the last stage as much as four of its 30 blocks",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=129)
    parser.add_argument("--new", type=int, default=64, help="most tokens of a row")
    parser.add_argument("--budget-s", type=float, default=8.0, help="of a run of the baseline")
    parser.add_argument("--pace", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, help="3, or with --quick 1")
    parser.add_argument("--quick", action="store_true", help="one round of two environments")
    parser.add_argument("--picture", type=Path, help="file for a chart (PNG)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.quick:
        options.budget_s = min(options.budget_s, 4.0)
    options.rounds = options.rounds or (1 if options.quick else 3)
    quick = ["E1", "E5"] if options.quick else list(PAPER_RATIOS)
    options.environments = options.environments or quick
    return options


if __name__ == "__main__":
    sys.exit(main())
