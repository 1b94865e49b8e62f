"""The best order exactly, for up to about ten peers.

All blocks are alike, so what the blocks cost on a set of peers doesn't depend on the order,
and what the links cost doesn't depend on the spans. For every set S of peers:

    latency(S) = cheapest spans on S  +  cheapest cycle through S

The spans of all 2^N sets are one min-plus product a set, the cycles are Held and Karp's
dynamic programme over (set, first, last). Where the ends hold more than blocks (the head is
the servers'), first and last peer are set apart and joined to the spans of the rest.
One pass is O(2^N (L^2 + N^3)), not N! orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.costs import FIRST, LAST, MIDDLE, ONLY
from bloombee.planner.limits import Limited, best_cap, caps, limit
from bloombee.planner.order_dp import Found, plan_order
from bloombee.planner.workload import Goal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bloombee.planner.costs import Costs
    from bloombee.planner.profiles import Floats

    Ints = NDArray[np.int64]

MOST_PEERS = 10
"""Beyond, tables of 2^N sets take more than a fraction of a second each."""


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of peers as bits of an index: their members, and their sizes."""

    sizes: Ints
    with_peer: tuple[Ints, ...]

    @staticmethod
    @lru_cache(maxsize=16)
    def of(peers: int) -> Sets:
        """All sets of that many peers."""
        index = np.arange(1 << peers, dtype=np.int64)
        members = (index[:, None] >> np.arange(peers)) & 1
        return Sets(
            members.sum(axis=1), tuple(np.flatnonzero(members[:, peer]) for peer in range(peers))
        )


def weights_of_sets(weights: Floats) -> Floats:
    """The sum of the members' weights for every set `[2^N]`; infinite for the empty one."""
    sums = np.zeros(1)
    for weight in weights:
        sums = np.concatenate([sums, sums + weight])
    sums[0] = np.inf
    return sums


def search_sets(
    costs: Costs, goal: Goal, weights: Floats | None = None, bound: float = float("inf")
) -> Found | None:
    """The best plan over all sets and orders; None when none scores below `bound`.

    `weights` `[2^N]` multiply the seconds of each set, so that a set can cost more than its
    time (dollars, watts) or be forbidden (infinite); they are positive. The score in the
    answer is then seconds x weight.
    """

    def solve(cap_s: float) -> tuple[Floats, _SetTable]:
        table = _SetTable(limit(costs, cap_s), same_roles=costs.same_roles)
        return table.latencies, table

    def score(latencies: Floats, bottleneck_s: float) -> Floats:
        seconds = goal.seconds(latencies, bottleneck_s, costs.micro_batches)
        return seconds if weights is None else seconds * weights

    every = np.array([np.inf]) if goal is Goal.SUM else caps(costs)
    best = best_cap(every, solve, score, bound)
    if best is None:
        return None
    order = best.answer.order(best.index)
    found = plan_order(costs, order, goal)
    return None if found is None else Found(found.route, found.cap_s, best.score)


class _SetTable:
    """Latencies of all sets under one cap."""

    def __init__(self, limited: Limited, *, same_roles: bool) -> None:
        self._limited = limited
        self._peers = limited.hop_s.shape[0]
        self._sets = Sets.of(self._peers)
        self._paths = _paths(limited.hop_s, self._sets)
        closing = limited.enter_s[:, :, None] + limited.leave_s[:, None, :]
        self._closing = closing.min(axis=0)  # [first, last]
        self._spans = _spans(limited.stage_s[MIDDLE])
        cycles = self._paths + self._closing
        if same_roles:
            best_cycle = cycles.reshape(len(cycles), -1).min(axis=1)
            self.latencies = self._spans[:, -1] + best_cycle
        else:
            self._ended = self._with_ends(cycles)
            self.latencies = self._ended.min(axis=(1, 2))
        self._cycles = cycles if same_roles else self._ended

    def _with_ends(self, cycles: Floats) -> Floats:
        """`[2^N, first, last]`: latencies where the ends cost other than the middle."""
        stages, peers = self._limited.stage_s, self._peers
        ended = np.full_like(cycles, np.inf)
        pairs = _pairs(stages[FIRST], stages[LAST])
        for first in range(peers):
            alone = 1 << first
            only = stages[ONLY, first, -1]
            ended[alone, first, first] = only + self._closing[first, first]
            for last in range(peers):
                if first == last:
                    continue
                both = self._sets.with_peer[first]
                both = both[(both >> last) & 1 == 1]
                rest = both ^ (1 << first) ^ (1 << last)
                blocks = (self._spans[rest] + pairs[first, last, ::-1]).min(axis=1)
                ended[both, first, last] = blocks + cycles[both, first, last]
        return ended

    def order(self, index: int) -> tuple[int, ...]:
        """The best order of the peers of set `index`."""
        cycles = self._cycles[index]
        first, last = (int(i) for i in np.unravel_index(int(cycles.argmin()), cycles.shape))
        order = [last]
        rest = index
        while order[0] != first:
            here = order[0]
            rest ^= 1 << here
            before = self._paths[rest, first] + self._limited.hop_s[:, here]
            order.insert(0, int(before.argmin()))
        return tuple(order)


def _spans(stage_s: Floats) -> Floats:
    """`[2^N, L + 1]`: least time of exactly l blocks on exactly these peers, each with one."""
    peers, length = stage_s.shape
    table = np.full((1 << peers, length), np.inf)
    table[0, 0] = 0.0
    for peer in range(peers):
        without, within = table[: 1 << peer], table[1 << peer : 2 << peer]
        for count in np.flatnonzero(np.isfinite(stage_s[peer])):
            longer = without[:, : length - count] + stage_s[peer, count]
            np.minimum(within[:, count:], longer, out=within[:, count:])
    return table


def _paths(hop_s: Floats, sets: Sets) -> Floats:
    """`[2^N, first, last]`: least time of the hops of a path through exactly these peers."""
    peers = len(hop_s)
    paths = np.full((1 << peers, peers, peers), np.inf)
    for peer in range(peers):
        paths[1 << peer, peer, peer] = 0.0
    for size in range(2, peers + 1):
        for last in range(peers):
            here = sets.with_peer[last]
            here = here[sets.sizes[here] == size]
            before = paths[here ^ (1 << last)] + hop_s[:, last]
            paths[here, :, last] = before.min(axis=2)
    return paths


def _pairs(first_s: Floats, last_s: Floats) -> Floats:
    """`[first, last, m]`: least time of m blocks on two ends together, each with one."""
    peers, length = first_s.shape
    pairs = np.full((peers, peers, length), np.inf)
    for count in np.flatnonzero(np.isfinite(first_s).any(axis=0)):
        longer = first_s[:, None, count, None] + last_s[None, :, : length - count]
        np.minimum(pairs[:, :, count:], longer, out=pairs[:, :, count:])
    return pairs
