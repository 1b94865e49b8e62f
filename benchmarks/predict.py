"""Does the cost model predict? Tokens/s of real swarms, beside what the planner says of them.

Paced servers in an emulated network (as root). Each tells its cost table, measured at its start,
and how its links are, measured by what goes over them; both as `bloombee-plan
--initial-peers` reads them. From that alone the planner predicts the decode tokens/s of a
layout, a batch and its micro-batches, by its event simulator; then a client decodes. Layouts,
batches, micro-batches, link rates (as ratio of a full-batch hop's wire time to a stage's compute
time, see `benchmarks/pipeline.py`), round trips and codecs vary.

The first prediction takes links as the servers report them, the second as they are set.

    python -m benchmarks.predict [--quick] [--seconds 6]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.predicted.agreement import errors, kendall, misordered, spearman
from benchmarks.predicted.bed import Bed, Member, Setup
from bloombee.cli.model_facts import facts_of
from bloombee.config.clusters import codecs
from bloombee.planner.assembly import Assembler
from bloombee.planner.observed import observe
from bloombee.planner.profiles import RAW, Codec, Network
from bloombee.planner.rehearsal import rehearse
from bloombee.planner.workload import Head, Shape, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.predicted.bed import Running
    from bloombee.planner.observed import Seen
    from bloombee.planner.profiles import Cluster

TARGET = 0.15
HOP_ROWS = 32
"""Ratios are of hops of so many rows, whatever the batch."""
WIRE_SHARE = 0.95
"""Of a link's rate, what is left beside headers."""
SETTLE_S = 3.0
NEW_TOKENS = 64
console = Console(width=150)


@dataclass(frozen=True)
class Layout:
    """Spans in order, and the codec between them."""

    name: str
    spans: tuple[str, ...]
    codec: str = "raw"


@dataclass(frozen=True)
class Case:
    """What is run on a layout."""

    batch: int
    groups: int
    ratio: float
    rtt_ms: float


THREE = Layout("3 stages", ("0:12", "12:23", "23:30"))
TWO = Layout("2 stages", ("0:17", "17:30"))
UNEVEN = Layout("3 uneven", ("0:18", "18:26", "26:30"))
FOUR = Layout("4 stages", ("0:9", "9:17", "17:25", "25:30"))
CODED = Layout("3, codec", ("0:12", "12:23", "23:30"), "split")
CASES: tuple[tuple[Layout, tuple[Case, ...]], ...] = (
    (
        THREE,
        (
            Case(32, 1, 0, 0),
            Case(32, 4, 0, 0),
            Case(32, 4, 1.1, 20),
            Case(32, 1, 6.5, 0),
            Case(8, 2, 0, 80),
            Case(4, 1, 0.6, 20),
        ),
    ),
    (TWO, (Case(32, 3, 0, 0), Case(16, 1, 0.17, 80), Case(16, 2, 1.1, 20))),
    (UNEVEN, (Case(32, 1, 0, 0), Case(32, 4, 0.6, 20))),
    (FOUR, (Case(32, 4, 0, 0), Case(16, 2, 1.1, 20))),
    (CODED, (Case(32, 4, 6.5, 20), Case(32, 1, 6.5, 0))),
)
QUICK: tuple[tuple[Layout, tuple[Case, ...]], ...] = (
    (THREE, (Case(32, 1, 0, 0), Case(32, 4, 0, 0), Case(32, 4, 6.5, 20), Case(8, 2, 0, 80))),
)


@dataclass(frozen=True)
class Found:
    """One case: tokens/s."""

    layout: Layout
    case: Case
    mbps: float | None
    reported: float
    as_set: float
    measured: float


class Predictor:
    """The planner's answer for one layout as its servers tell it."""

    def __init__(self, model: str, layout: Layout, prompt: int) -> None:
        self.model = facts_of(model, 2)
        self._codecs: tuple[Codec, ...] = (RAW,)
        self._prompt = prompt
        if layout.codec != "raw":
            facts = codecs()["split-bf16"]
            speeds = facts.encode_mb_s * 1e6, facts.decode_mb_s * 1e6
            self._codecs = (Codec("split", facts.ratio, *speeds),)

    def cluster(self, seen: Sequence[Seen]) -> Cluster:
        """As the servers report everything."""
        observed = observe(seen, self.model, self._codecs)
        if observed.refused:
            raise RuntimeError(f"tables that make no sense: {observed.refused}")
        return observed.cluster

    def tokens_per_s(self, cluster: Cluster, spans: Sequence[int], case: Case) -> float:
        """The simulator's answer for servers of so many blocks each."""
        rows = -(-case.batch // case.groups)
        workload = Workload(prompt_tokens=self._prompt, new_tokens=NEW_TOKENS)
        shape = Shape(case.batch, rows, 128, Head.SERVER)
        route = Assembler(self.model, cluster, workload).route(shape, tuple(enumerate(spans)))
        return rehearse(route, workload).tokens_per_s

    def stage_s(self, cluster: Cluster, spans: Sequence[int]) -> float:
        """How long a stage takes for a full batch, in the median of stages."""
        context = self._prompt + NEW_TOKENS / 2
        return median(
            peer.pass_s + blocks * peer.decode.at(HOP_ROWS, context)
            for peer, blocks in zip(cluster.peers, spans, strict=True)
        )


def as_set(cluster: Cluster, mbps: float | None, rtt_ms: float) -> Cluster:
    """The same servers with links as the emulation has them."""
    size = len(cluster.network)
    elsewhere = 1 - np.eye(size)
    rate = 1e10 if mbps is None else mbps * 1e6 / 8 * WIRE_SHARE
    network = Network(elsewhere * rtt_ms / 2e3, elsewhere * rate)
    return replace(cluster, network=network)


def run_layout(
    bed: Bed, layout: Layout, cases: Sequence[Case], options: argparse.Namespace
) -> list[Found]:
    """Start the swarm, and predict and measure each case."""
    bed.unshape()
    predictor = Predictor(options.model, layout, bed.setup.prompt)
    members = [Member(span, options.pace) for span in layout.spans]
    found: list[Found] = []
    with bed.swarm(members, layout.codec) as running:
        for batch in {case.batch for case in cases}:  # prompts are computed once, and kept
            running.settle(batch, 1, 1.0)
        for case in cases:
            found.append(_run(bed, predictor, running, layout, case, options.seconds))
            console.print(_line(found[-1]))
    return found


def _run(  # noqa: PLR0913 - one case with all that it needs
    bed: Bed, predictor: Predictor, running: Running, layout: Layout, case: Case, seconds: float
) -> Found:
    seen = running.seen()
    spans = [len(server.span) for server in seen]
    stage_s = predictor.stage_s(predictor.cluster(seen), spans)
    hop_bits = HOP_ROWS * predictor.model.row_bytes * 8
    mbps = hop_bits / (case.ratio * stage_s) / 1e6 if case.ratio else None
    bed.shape(mbps, case.rtt_ms)
    running.settle(case.batch, case.groups, SETTLE_S)
    cluster = predictor.cluster(running.seen())
    reported = predictor.tokens_per_s(cluster, spans, case)
    ideal = predictor.tokens_per_s(as_set(cluster, mbps, case.rtt_ms), spans, case)
    measured = running.tokens_per_s(case.batch, case.groups, seconds)
    bed.unshape()
    return Found(layout, case, mbps, reported, ideal, measured)


def _line(found: Found) -> str:
    case = found.case
    return (
        f"{found.layout.name}, batch {case.batch} in {case.groups}, ratio {case.ratio:g}, "
        f"RTT {case.rtt_ms:g} ms: {found.measured:.1f} measured, {found.reported:.1f} predicted "
        f"({found.as_set:.1f} by links as set)"
    )


def report(found: Sequence[Found]) -> None:
    """The table, and how well it agrees."""
    table = Table(
        "layout", "blocks", "batch", "micro-batches", "ratio", "Mbit/s", "RTT ms", "measured",
        "predicted", "error", "links as set", "error",
    )  # fmt: skip
    measured = [each.measured for each in found]
    for each in found:
        case = each.case
        table.add_row(
            each.layout.name,
            " ".join(each.layout.spans),
            str(case.batch),
            str(case.groups),
            f"{case.ratio:g}",
            "-" if each.mbps is None else f"{each.mbps:.2f}",
            f"{case.rtt_ms:g}",
            f"{each.measured:.1f}",
            f"{each.reported:.1f}",
            f"{each.reported / each.measured - 1:+.1%}",
            f"{each.as_set:.1f}",
            f"{each.as_set / each.measured - 1:+.1%}",
        )
    console.print(table)
    for name, guesses in (
        ("links as reported", [each.reported for each in found]),
        ("links as set", [each.as_set for each in found]),
    ):
        console.print(f"{name}: {agreement(guesses, measured)}")


def agreement(guesses: Sequence[float], measured: Sequence[float]) -> str:
    """How far off, and whether in order."""
    off = [abs(error) for error in errors(guesses, measured)]
    inside = sum(error <= TARGET for error in off)
    wrong = misordered(guesses, measured, TARGET)
    return (
        f"{inside} of {len(off)} within {TARGET:.0%}, median error {median(off):.1%}, largest "
        f"{max(off):.1%}; Spearman {spearman(guesses, measured):.3f}, Kendall "
        f"{kendall(guesses, measured):.3f}; {len(wrong)} pairs that differ by more than "
        f"{TARGET:.0%} are in the wrong order"
    )


def main() -> int:
    """Run all layouts and print."""
    options = _options()
    plan = QUICK if options.quick else CASES
    most = max(len(layout.spans) for layout, _ in plan)
    found: list[Found] = []
    with ExitStack() as stack:
        setup = Setup(options.model, options.prompt, HOP_ROWS, options.profile_s)
        bed = Bed(setup, most, stack)
        for layout, cases in plan:
            found += run_layout(bed, layout, cases, options)
    report(found)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--prompt", type=int, default=129,
        help="whole pieces of 64 tokens and one more: the pieces are kept by the servers",
    )  # fmt: skip
    parser.add_argument("--pace", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measured run")
    parser.add_argument("--profile-s", type=float, default=2.5, help="see bloombee-server --help")
    parser.add_argument("--quick", action="store_true", help="one layout, four cases")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
