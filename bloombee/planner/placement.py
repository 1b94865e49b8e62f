"""Which blocks a newcomer should hold: those that the swarm covers least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bloombee.core import Span

if TYPE_CHECKING:
    from collections.abc import Sequence


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
