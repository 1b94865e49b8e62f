"""Who should hold which blocks: the plan, beside an equal split and Petals' greedy rule, for real.

Servers of different speed (paced), memory (a limit of blocks) and links sit in an emulated
network (as root). First all share the blocks equally, as memory lets them, tell what they
cost and how their links are, and decode a batch. From what they told, as `bloombee-plan
--initial-peers` reads it, the planner places the blocks anew, over as many servers as pay.
Petals' rule has each server in turn take all that fits where the swarm serves least. Each
placement is started and decodes the same batch: the whole batch at once, in four micro-batches,
and the plan also in as many as it has; the best counts. `benchmarks/planner.py contest` compares
them, and a max-flow placement, in the cost model on clusters of Helix's shape.

    python -m benchmarks.placements [--quick] [--seconds 6]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.economy import Economy, add_flags, economy_line
from benchmarks.predicted.bed import CLIENT, Bed, Member, Setup
from bloombee.cli.model_facts import facts_of
from bloombee.planner.layouts import Layout, equal_split, greedy
from bloombee.planner.observed import observe
from bloombee.planner.planning import Problem, candidates
from bloombee.planner.rehearsal import rank
from bloombee.planner.workload import Head, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.predicted.bed import Running
    from bloombee.planner.observed import Seen

BATCH, NEW_TOKENS = 32, 64
GROUPS = (1, 4)
console = Console(width=140)


@dataclass(frozen=True)
class Machine:
    """How many times slower than this machine, blocks that fit, Mbit/s either way, and RTT.

    Two machines are the mean of their round trips apart.
    """

    pace: float
    blocks: int
    mbps: float
    rtt_ms: float


@dataclass(frozen=True)
class Scene:
    """Machines in the order in which they join."""

    name: str
    machines: tuple[Machine, ...]


SCENES = (
    Scene(
        "two good ones among five",
        (
            Machine(12, 10, 4, 30),
            Machine(4, 16, 20, 10),
            Machine(12, 10, 2, 60),
            Machine(4, 16, 20, 10),
            Machine(8, 10, 8, 20),
        ),
    ),
    Scene(
        "a slow link in the middle",
        (
            Machine(6, 14, 20, 10),
            Machine(6, 14, 1, 80),
            Machine(6, 14, 20, 10),
            Machine(6, 14, 20, 10),
        ),
    ),
    Scene(
        "six small ones",
        (
            Machine(4, 8, 20, 10),
            Machine(16, 8, 20, 10),
            Machine(8, 8, 20, 10),
            Machine(4, 10, 20, 10),
            Machine(16, 8, 20, 10),
            Machine(8, 8, 20, 10),
        ),
    ),
)


@dataclass(frozen=True)
class Served:
    """What one placement gave: tokens/s, with how many micro-batches; predicted where planned."""

    spans: tuple[str, ...]
    tokens_per_s: float
    groups: int
    predicted: float = 0.0


def problem_of(seen: Sequence[Seen], scene: Scene, setup: Setup) -> Problem:
    """What the planner is asked, with the machines' memory as the scene has it.

    A limit is of blocks with their KV; the ends of the model come beside it.
    """
    model = facts_of(setup.model, 2)
    observed = observe(seen, model)
    if observed.refused:
        raise RuntimeError(f"tables that make no sense: {observed.refused}")
    workload = Workload(
        prompt_tokens=setup.prompt,
        new_tokens=NEW_TOKENS,
        batches=(BATCH,),
        chunk_tokens=(128,),
        heads=(Head.SERVER,),
    )
    pages = -(-workload.full_tokens // workload.page_tokens) * BATCH
    each = model.block_bytes + pages * workload.page_tokens * model.kv_bytes_per_token
    peers = tuple(
        replace(peer, device_bytes=machine.blocks * each + each // 2, workspace_bytes_per_row=0)
        for peer, machine in zip(observed.cluster.peers, scene.machines, strict=True)
    )
    beside = replace(model, embed_bytes=0, head_bytes=0)
    return Problem(beside, replace(observed.cluster, peers=peers), workload)


def kv_tokens(setup: Setup) -> int:
    """Room for the batch."""
    return BATCH * (-(-(setup.prompt + NEW_TOKENS) // 64) * 64)


def planned(problem: Problem) -> tuple[list[str | None], int, float]:
    """Spans by server, micro-batches, and the tokens/s that the plan promises."""
    plan = rank(problem, candidates(problem))[0]
    spans: list[str | None] = [None] * len(problem.cluster.peers)
    for stage in plan.routes[0].stages:
        spans[stage.index] = str(stage.span)
    return spans, plan.routes[0].shape.micro_batches, plan.tokens_per_s


def spans_of(layout: Layout | None) -> list[str | None]:
    """A layout's spans as text. Raises RuntimeError when nothing fits."""
    if layout is None:
        raise RuntimeError("the machines have no room for the model")
    return [None if span is None else str(span) for span in layout.spans]


class Contest:
    """One scene in its network."""

    def __init__(self, bed: Bed, scene: Scene, options: argparse.Namespace) -> None:
        self._bed = bed
        self._scene = scene
        self._options = options

    def run(self) -> dict[str, Served]:
        """All placements, by name."""
        blocks = facts_of(self._bed.setup.model, 2).blocks
        first = _equal(blocks, [machine.blocks for machine in self._scene.machines])
        equal, seen = self._serve(first, GROUPS)
        problem = problem_of(seen, self._scene, self._bed.setup)
        room = kv_tokens(self._bed.setup)
        again = spans_of(equal_split(problem, room))
        if again != first:
            raise RuntimeError(f"two equal splits: {first} and {again}")
        spans, groups, promised = planned(problem)
        ours, _ = self._serve(spans, (*GROUPS, groups))
        petals, _ = self._serve(spans_of(greedy(problem, room)), GROUPS)
        return {
            "planned": replace(ours, predicted=promised),
            "equal split": equal,
            "Petals' greedy rule": petals,
        }

    def _serve(
        self, spans: Sequence[str | None], groups: Sequence[int]
    ) -> tuple[Served, list[Seen]]:
        """Start it and decode; what the servers tell at the end."""
        machines = self._scene.machines
        members = [
            None if span is None else Member(span, machine.pace)
            for span, machine in zip(spans, machines, strict=True)
        ]
        self._shape(shaped=False)
        with self._bed.swarm(members) as running:
            running.settle(BATCH, 1, 1.0)  # prompts are kept from then on
            self._shape(shaped=True)
            rates = {count: self._rate(running, count) for count in dict.fromkeys(groups)}
            seen = running.seen()
        best = max(rates, key=lambda count: rates[count])
        held = tuple(span or "-" for span in spans)
        return Served(held, rates[best], best), seen

    def _rate(self, running: Running, groups: int) -> float:
        running.settle(BATCH, groups, self._options.seconds / 3)
        return running.tokens_per_s(BATCH, groups, self._options.seconds)

    def _shape(self, *, shaped: bool) -> None:
        """The links of the scene, or none: starting and prompts are not measured."""
        bed, machines = self._bed, self._scene.machines
        names = (CLIENT, *bed.hosts[: len(machines)])
        rtts_ms = (10.0, *(machine.rtt_ms for machine in machines))
        for host, machine in zip(names[1:], machines, strict=True):
            rate = machine.mbps if shaped else None
            bed.network.set_rate(host, rate, rate)
        for i, one in enumerate(names):
            for j in range(i + 1, len(names)):
                delay_ms = (rtts_ms[i] + rtts_ms[j]) / 4 if shaped else 0.0
                bed.network.set_delay(one, names[j], delay_ms)


def _equal(blocks: int, limits: Sequence[int]) -> list[str | None]:
    """As equal as the limits let it be; as `layouts.equal_split` does it."""
    counts = [0] * len(limits)
    for _ in range(blocks):
        open_ones = [i for i, limit in enumerate(limits) if counts[i] < limit]
        counts[min(open_ones, key=lambda i: (counts[i], i))] += 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [f"{end - count}:{end}" for end, count in zip(ends, counts, strict=True)]


def report(scene: Scene, results: dict[str, Served], machine: Economy) -> None:
    """One table."""
    told = ", ".join(f"{m.pace:g} x {m.blocks} {m.mbps:g}" for m in scene.machines)
    table = Table(
        *("placement", "blocks by server", "micro-batches", "tokens/s", "planned /", "promised"),
        title=f"{scene.name} (pace, most blocks, Mbit/s: {told})",
    )
    ours = results["planned"].tokens_per_s
    for name, served in results.items():
        table.add_row(
            name,
            " ".join(served.spans),
            str(served.groups),
            f"{served.tokens_per_s:.1f}",
            f"{ours / served.tokens_per_s:.2f}",
            f"{served.predicted:.1f}" if served.predicted else "-",
        )
    console.print(table)
    console.print(f"planned: {economy_line(ours, machine)}")


def main() -> int:
    """Run all scenes and print; 1 when the plan is the slower one somewhere."""
    options = _options()
    machine = Economy.of(options)
    scenes = SCENES[:1] if options.quick else SCENES
    good = True
    for scene in scenes:
        with ExitStack() as stack:
            setup = Setup(options.model, options.prompt, BATCH, options.profile_s)
            bed = Bed(setup, len(scene.machines), stack)
            results = Contest(bed, scene, options).run()
        report(scene, results, machine)
        good &= results["planned"].tokens_per_s >= max(r.tokens_per_s for r in results.values())
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--prompt", type=int, default=129,
        help="whole pieces of 64 tokens and one more: the pieces are kept by the servers",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measured run")
    parser.add_argument("--profile-s", type=float, default=1.0, help="see bloombee-server --help")
    parser.add_argument("--quick", action="store_true", help="the first scene only")
    add_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
