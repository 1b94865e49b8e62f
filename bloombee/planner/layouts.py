"""Placements of other systems, to compare with: equal split, Petals' greedy rule, max-flow.

A layout gives every peer a fixed span; spans may overlap, and requests take chains of peers
through them. These are baselines, written from the systems' descriptions and given every
benefit of the doubt (direct hops, the servers' head, load spread over all chains).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.core import Span
from bloombee.planner.flow import Flow, max_flow
from bloombee.planner.placement import choose_span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bloombee.planner.planning import Problem
    from bloombee.planner.profiles import PeerProfile

FLOW_ROWS = 64
"""Sequences in the passes at which a peer's flow in tokens/s is taken."""
MOST_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The span of every peer, by index; None holds nothing."""

    spans: tuple[Span | None, ...]

    def placed(self) -> list[tuple[int, Span]]:
        """Peers that hold something, by where their span begins."""
        held = [(peer, span) for peer, span in enumerate(self.spans) if span is not None]
        return sorted(held, key=lambda pair: (pair[1].start, pair[0]))


@dataclass(frozen=True, slots=True)
class Chain:
    """A way through a layout: peers with the blocks each computes, and its share of the work."""

    steps: tuple[tuple[int, int], ...]
    share: float


def capacities(problem: Problem, kv_tokens: int) -> list[int]:
    """Blocks that fit on each peer beside so many tokens of KV for each, none offloaded."""
    model = problem.model
    each = model.block_bytes + kv_tokens * model.kv_bytes_per_token
    ends = max(model.embed_bytes, model.head_bytes)
    free = [peer.device_bytes - peer.workspace_bytes - ends for peer in problem.cluster.peers]
    return [max(0, min(model.blocks, room // each)) for room in free]


def equal_split(problem: Problem, kv_tokens: int) -> Layout | None:
    """All peers in their order with as many blocks each as memory lets be equal."""
    room, left = capacities(problem, kv_tokens), problem.model.blocks
    if sum(room) < left:
        return None
    counts = [0] * len(room)
    while left:
        open_peers = [peer for peer, limit in enumerate(room) if counts[peer] < limit]
        least = min(counts[peer] for peer in open_peers)
        for peer in [p for p in open_peers if counts[p] == least][:left]:
            counts[peer] += 1
            left -= 1
    spans: list[Span | None] = []
    start = 0
    for count in counts:
        spans.append(Span(start, start + count) if count else None)
        start += count
    return Layout(tuple(spans))


def greedy(problem: Problem, kv_tokens: int) -> Layout:
    """Petals' rule: each joiner in turn takes all that fits, where the swarm serves least."""
    blocks = problem.model.blocks
    coverage, spans = [0.0] * blocks, list[Span | None]()
    for peer, room in zip(problem.cluster.peers, capacities(problem, kv_tokens), strict=True):
        if not room:
            spans.append(None)
            continue
        span = choose_span(blocks, room, coverage)
        spans.append(span)
        for block in range(span.start, span.end):
            coverage[block] += _rate(problem, peer, len(span))
    return Layout(tuple(spans))


def most_flow(problem: Problem, kv_tokens: int, sweeps: int = MOST_SWEEPS) -> Layout:
    """Helix's aim: the placement of most flow in tokens/s, found by local search.

    Helix solves it as a mixed-integer programme for minutes to hours; this moves one peer's
    span at a time while the flow grows, from the better of the two other layouts.
    """
    room = capacities(problem, kv_tokens)
    starts = [greedy(problem, kv_tokens), equal_split(problem, kv_tokens)]
    scored = [(flow_of(problem, layout).value, layout) for layout in starts if layout is not None]
    best, layout = max(scored, key=lambda pair: pair[0])
    for _ in range(sweeps):
        before = best
        for peer, limit in enumerate(room):
            for span in _moves(layout, peer, limit, problem.model.blocks):
                spans = (*layout.spans[:peer], span, *layout.spans[peer + 1 :])
                value = flow_of(problem, Layout(spans)).value
                if value > best * (1 + 1e-9):
                    best, layout = value, Layout(spans)
        if best <= before * (1 + 1e-9):
            break
    return layout


def _moves(layout: Layout, peer: int, limit: int, blocks: int) -> Iterator[Span]:
    """Spans that begin where another ends, or end where another begins, of a few lengths."""
    others = [span for index, span in layout.placed() if index != peer]
    edges = sorted({0, blocks, *(s.start for s in others), *(s.end for s in others)})
    lengths = sorted({limit, limit * 3 // 4, limit // 2} - {0}, reverse=True)
    seen: set[Span] = set()
    for length in lengths:
        for edge in edges:
            for start in (edge, edge - length):
                if 0 <= start <= blocks - length and Span(start, start + length) not in seen:
                    seen.add(Span(start, start + length))
                    yield Span(start, start + length)


def _rate(problem: Problem, peer: PeerProfile, blocks: int) -> float:
    """Tokens/s of a span of so many blocks in large passes."""
    context = problem.workload.usual_tokens
    return FLOW_ROWS / (peer.pass_s + blocks * peer.decode.at(FLOW_ROWS, context))


def flow_of(problem: Problem, layout: Layout) -> Flow:
    """The max-flow of a layout in tokens/s; nodes are peers, source and sink the last two.

    A peer may be entered anywhere in its span, as in Helix.
    """
    placed, net = layout.placed(), problem.cluster.network
    row_bytes, source, sink = problem.model.row_bytes, len(placed), len(placed) + 1
    through = [_rate(problem, problem.cluster.peers[peer], len(span)) for peer, span in placed]
    edges: dict[tuple[int, int], float] = {}
    for i, (peer, span) in enumerate(placed):
        if span.start == 0:
            edges[source, i] = float("inf")
        if span.end == problem.model.blocks:
            edges[i, sink] = float("inf")
        for j, (other, after) in enumerate(placed):
            if after.start <= span.end < after.end:
                edges[i, j] = float(net.bytes_per_s[peer, other]) / row_bytes
    return max_flow(through, edges)


def chains(problem: Problem, layout: Layout) -> list[Chain]:
    """The chains of a layout that carry its max-flow, with their shares; none without flow."""
    placed, flow = layout.placed(), flow_of(problem, layout)
    made: list[Chain] = []
    for path, value in flow.paths:
        steps = _steps([placed[node] for node in path])
        made.append(Chain(steps, value / flow.value))
    return made


def _steps(path: Sequence[tuple[int, Span]]) -> tuple[tuple[int, int], ...]:
    """Each peer computes from where the one before it ended."""
    steps: list[tuple[int, int]] = []
    done = 0
    for peer, span in path:
        steps.append((peer, span.end - done))
        done = span.end
    return tuple(steps)
