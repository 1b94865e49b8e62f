"""Which blocks a newcomer should hold: those where the swarm serves least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bloombee.core import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bloombee.core import PeerId


@dataclass(frozen=True, order=True, slots=True)
class Newcomer:
    """A server that has yet to choose, how many blocks it takes, and what it gives to each."""

    peer: PeerId
    capacity_blocks: int
    rate: float = 1.0


def choose_span(
    num_blocks: int,
    capacity_blocks: int,
    coverage: Sequence[float],
    rate: float = float("inf"),
) -> Span:
    """The span of `capacity_blocks` blocks (all, if fewer) that helps the swarm most.

    `coverage` holds what serves each block now, in any one unit (servers, tokens/s), and
    `rate` what the newcomer adds. The weakest blocks bound the swarm, so the choice leaves
    the weakest block as strong as possible, then the second weakest, and so on. Ties go
    to the lowest start, so that peers who see the same swarm choose alike.

    Raises ValueError when there is no block, no capacity, or `coverage` has another
    length than `num_blocks`.
    """
    if num_blocks < 1 or capacity_blocks < 1:
        raise ValueError(f"can't place {capacity_blocks} of {num_blocks} blocks")
    if len(coverage) != num_blocks:
        raise ValueError(f"coverage of {len(coverage)} blocks for a model of {num_blocks}")
    width = min(capacity_blocks, num_blocks)
    starts = np.arange(num_blocks - width + 1)[:, None]
    blocks = np.arange(num_blocks)
    taken = (blocks >= starts) & (blocks < starts + width)
    row = np.asarray(coverage, float)
    # Rounded: equal rates that were added up in another order are equal.
    after = np.sort(np.where(taken, row + rate, row).round(6), axis=1)
    best = int(np.lexsort((-starts[:, 0], *after.T[::-1]))[-1])
    return Span(best, best + width)


def spread(
    num_blocks: int, coverage: Sequence[float], newcomers: Iterable[Newcomer]
) -> dict[PeerId, Span]:
    """The spans of servers that choose at the same time, so that they don't all choose alike.

    Each takes its turn by peer id and adds its rate to the blocks of those before it.
    Peers that know of the same newcomers compute the same, without a leader. `coverage`
    is in the unit of the rates. Raises ValueError as `choose_span` does.
    """
    held = list(coverage)
    chosen: dict[PeerId, Span] = {}
    for newcomer in sorted(newcomers):
        span = choose_span(num_blocks, newcomer.capacity_blocks, held, newcomer.rate)
        chosen[newcomer.peer] = span
        for block in range(span.start, span.end):
            held[block] += newcomer.rate
    return chosen
