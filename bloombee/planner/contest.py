"""Any layout in the simulator: what it really serves, with its KV and its queues.

Passes that wait at a peer are merged, and every chain takes its share of the jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.planner.jobs import Course, Job, Outcome, Station, Wire
from bloombee.planner.layouts import Chain, Layout, chains
from bloombee.planner.simulator import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.core import Span
    from bloombee.planner.plan import Plan
    from bloombee.planner.planning import Problem

MERGED_ROWS = 256
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """How a contest is run: so many sequences in all, `rows` of them together in a job."""

    sequences: int = 1024
    rows: int = 8
    chunk_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Contender:
    """A layout and the chains that requests take through it."""

    layout: Layout
    ways: tuple[Chain, ...]


def by_flow(problem: Problem, layout: Layout) -> Contender:
    """A layout whose requests follow its max-flow."""
    return Contender(layout, tuple(chains(problem, layout)))


def by_plan(problem: Problem, plan: Plan) -> Contender:
    """A plan's routes; what they would offload or stream isn't."""
    spans: list[Span | None] = [None] * len(problem.cluster.peers)
    for route in plan.routes:
        for stage in route.stages:
            spans[stage.index] = stage.span
    ways = tuple(
        Chain(
            tuple((stage.index, len(stage.span)) for stage in route.stages),
            route.tokens_per_s / plan.tokens_per_s,
        )
        for route in plan.routes
    )
    return Contender(Layout(tuple(spans)), ways)


def serve(problem: Problem, contender: Contender, entry: Entry | None = None) -> Outcome | None:
    """Serve a backlog of sequences to its end; None when KV has room for none of them.

    Tokens over `end_s` is what the layout serves, prompts included.
    """
    entry = entry or Entry()
    workload, placed = problem.workload, contender.layout.placed()
    each = entry.rows * workload.full_tokens
    room = {peer: _kv_room(problem, peer, span) for peer, span in placed}
    ways = [way for way in contender.ways if all(each * n <= room[peer] for peer, n in way.steps)]
    if not ways:
        return None
    stations = [_station(problem, peer, span, room[peer]) for peer, span in placed]
    index = {peer: place for place, (peer, _) in enumerate(placed)}
    wires = _Wires(problem)
    courses = [_course(problem, way, index, wires) for way in ways]
    jobs = [
        Job(way, entry.rows, workload.prompt_tokens, workload.new_tokens, entry.chunk_tokens)
        for way in _in_turn(ways, -(-entry.sequences // entry.rows))
    ]
    return Simulation(stations, wires.made, courses).run(jobs)


def _kv_room(problem: Problem, peer: int, span: Span) -> int:
    """Tokens x blocks of KV beside the weights, on the device."""
    machine, model = problem.cluster.peers[peer], problem.model
    ends = model.embed_bytes if span.start == 0 else 0
    ends += model.head_bytes if span.end == model.blocks else 0
    workspace = machine.workspace_bytes + machine.workspace_bytes_per_row * MERGED_ROWS
    free = machine.device_bytes - workspace - ends - len(span) * model.block_bytes
    return max(0, free // model.kv_bytes_per_token)


def _station(problem: Problem, peer: int, span: Span, room: int) -> Station:
    machine, workload = problem.cluster.peers[peer], problem.workload
    is_last = span.end == problem.model.blocks

    def seconds(blocks: int, decode_rows: int, prefill_rows: int) -> float:
        total = machine.pass_s
        if decode_rows:
            total += blocks * machine.decode.at(decode_rows, workload.usual_tokens)
            total += machine.head.at(decode_rows, 0) if is_last else 0.0
        if prefill_rows:
            total += blocks * machine.prefill.at(prefill_rows, workload.prompt_tokens / 2)
        return total

    return Station(str(machine.peer), seconds, room, MERGED_ROWS)


class _Wires:
    """The links that chains use, each made once."""

    def __init__(self, problem: Problem) -> None:
        self._network = problem.cluster.network
        self._row_bytes = problem.model.row_bytes
        self._index: dict[tuple[int, int, bool], int] = {}
        self.made: list[Wire] = []

    def between(self, source: int, target: int, *, ids: bool) -> int:
        """The link's index; it carries ids or hidden states."""
        key = (source, target, ids)
        if key not in self._index:
            self._index[key] = len(self.made)
            self.made.append(self._wire(source, target, ids=ids))
        return self._index[key]

    def _wire(self, source: int, target: int, *, ids: bool) -> Wire:
        each = ID_BYTES if ids else self._row_bytes
        alpha = float(self._network.latency_s[source, target])
        rate = float(self._network.bytes_per_s[source, target]) if source != target else 1e18

        def busy(decode_rows: int, prefill_rows: int) -> float:
            return (decode_rows + prefill_rows) * each / rate

        def latency(decode_rows: int, prefill_rows: int) -> float:
            return alpha + busy(decode_rows, prefill_rows)

        return Wire(f"{source} -> {target}{' ids' if ids else ''}", busy, latency)


def _course(problem: Problem, chain: Chain, index: dict[int, int], wires: _Wires) -> Course:
    peers = [peer for peer, _ in chain.steps]
    client = len(problem.cluster.peers)
    pairs = zip(peers, peers[1:], strict=False)
    return Course(
        tuple(index[peer] for peer in peers),
        tuple(blocks for _, blocks in chain.steps),
        wires.between(client, peers[0], ids=True),
        (
            wires.between(peers[-1], peers[0], ids=True),
            *(wires.between(source, target, ids=False) for source, target in pairs),
        ),
    )


def _in_turn(ways: Sequence[Chain], jobs: int) -> list[int]:
    """Chains by turns, each as often as its share says (interleaved weighted round robin)."""
    total = sum(way.share for way in ways)
    credit = [0.0] * len(ways)
    turns: list[int] = []
    for _ in range(jobs):
        credit = [c + way.share / total for c, way in zip(credit, ways, strict=True)]
        chosen = max(range(len(ways)), key=lambda way: (credit[way], -way))
        credit[chosen] -= 1
        turns.append(chosen)
    return turns
