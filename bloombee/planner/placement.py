"""Which blocks a newcomer should hold: those that the swarm covers least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.core import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bloombee.core import PeerId


@dataclass(frozen=True, order=True, slots=True)
class Newcomer:
    """A server that has yet to choose, and how many blocks it takes."""

    peer: PeerId
    capacity_blocks: int


def choose_span(num_blocks: int, capacity_blocks: int, coverage: Sequence[float]) -> Span:
    """The span of `capacity_blocks` blocks (all, if fewer) that helps the swarm most.

    `coverage` holds what serves each block now, in any one unit (servers, tokens/s).
    The weakest blocks bound the swarm, so the choice leaves the weakest block outside
    the span as strong as possible, then the second weakest, and so on. That is the
    window whose sorted coverage is smallest: it takes in the most copies of the lowest
    value, then of the next. Ties go to the lowest start, so that peers who see the
    same swarm choose alike.

    Raises ValueError when there is no block, no capacity, or `coverage` has another
    length than `num_blocks`.
    """
    if num_blocks < 1 or capacity_blocks < 1:
        raise ValueError(f"can't place {capacity_blocks} of {num_blocks} blocks")
    if len(coverage) != num_blocks:
        raise ValueError(f"coverage of {len(coverage)} blocks for a model of {num_blocks}")
    width = min(capacity_blocks, num_blocks)
    starts = range(num_blocks - width + 1)
    best = min(starts, key=lambda start: (sorted(coverage[start : start + width]), start))
    return Span(best, best + width)


def spread(
    num_blocks: int, coverage: Sequence[float], newcomers: Iterable[Newcomer]
) -> dict[PeerId, Span]:
    """The spans of servers that choose at the same time, so that they don't all choose alike.

    Each takes its turn by peer id and counts as one more server on the blocks of those
    before it. Peers that know of the same newcomers compute the same, without a leader.
    `coverage` holds servers per block. Raises ValueError as `choose_span` does.
    """
    held = list(coverage)
    chosen: dict[PeerId, Span] = {}
    for newcomer in sorted(newcomers):
        span = choose_span(num_blocks, newcomer.capacity_blocks, held)
        chosen[newcomer.peer] = span
        for block in range(span.start, span.end):
            held[block] += 1
    return chosen
