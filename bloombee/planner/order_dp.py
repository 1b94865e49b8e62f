"""The exact plan for peers in a given order: who is used, and the span of each.

`F[p, g, l]` is the least latency of a route through group g's entrance whose last peer so
far is p and which covers the first l blocks. A peer that is left out changes the link
between its neighbours, so the previous used peer is part of the state:

    F[p, g, l] = min over n of  G[p, g, l - n] + stage(p, n)
    G[p, g, l] = min over q before p of  F[q, g, l] + hop(q, p)

The hop doesn't depend on the span, so that is O(N^2 L + N L^2) a group, not O(N^2 L^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.costs import FIRST, LAST, MIDDLE, ONLY
from bloombee.planner.limits import Limited, best_cap, caps, limit
from bloombee.planner.workload import Goal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bloombee.planner.costs import Costs
    from bloombee.planner.profiles import Floats

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Found:
    """A route: peers by index with the number of blocks of each, the cap it keeps, its score."""

    route: tuple[tuple[int, int], ...]
    cap_s: float
    score_s: float


def plan_order(
    costs: Costs,
    order: Sequence[int],
    goal: Goal,
    bound: float = float("inf"),
    penalty_s: Floats | None = None,
) -> Found | None:
    """The best plan whose used peers come in `order`; None when none scores below `bound`.

    `penalty_s[p]` is added to the latency of every plan that uses peer p, and so to its score.
    """
    table = _Table(costs, np.asarray(order, dtype=np.int64), penalty_s)
    if goal is Goal.SUM:
        solved = table.solve(float("inf"))
        least = solved.least
        return Found(solved.route(), float("inf"), least) if least < bound else None

    def solve(cap_s: float) -> tuple[Floats, _Solved]:
        solved = table.solve(cap_s)
        return np.array([solved.least]), solved

    def score(latencies: Floats, bottleneck_s: float) -> Floats:
        return goal.seconds(latencies, bottleneck_s, costs.micro_batches)

    best = best_cap(caps(costs), solve, score, bound)
    return None if best is None else Found(best.answer.route(), best.cap_s, best.score)


def front(costs: Costs, order: Sequence[int]) -> list[tuple[float, float]]:
    """The Pareto front of (bottleneck, latency) for `order`, by falling bottleneck."""
    table = _Table(costs, np.asarray(order, dtype=np.int64))
    points: list[tuple[float, float]] = []
    for cap in caps(costs)[::-1]:
        least = table.solve(float(cap)).least
        if np.isinf(least):
            break
        if points and least <= points[-1][1]:
            points.pop()
        points.append((float(cap), least))
    return points


class _Table:
    """The costs of one order, laid out for the recurrence once for all caps."""

    def __init__(self, costs: Costs, order: Ints, penalty_s: Floats | None = None) -> None:
        self._costs = costs
        self._order = order
        self._penalty_s = None if penalty_s is None else penalty_s[order, None]
        spans = np.isfinite(costs.stage_s).reshape(-1, costs.blocks + 1)
        self._longest = int((spans * np.arange(costs.blocks + 1)).max(initial=1))

    def solve(self, cap_s: float) -> _Solved:
        """Least latencies with every resource busy for at most `cap_s`."""
        limited = limit(self._costs, cap_s)
        order, last_block, longest = self._order, self._costs.blocks, self._longest
        stages = limited.stage_s[:, order]
        if self._penalty_s is not None:
            stages = stages + self._penalty_s
        hops = limited.hop_s[order[:, None], order]
        enter, leave = limited.enter_s[:, order].T, limited.leave_s[:, order].T
        reached = enter[:, :, None] + stages[FIRST][:, None, :]  # F[p, g, l]
        # G[p, g, l], with room before l = 0 so that every span length reads a window of it.
        padded = np.full((*enter.shape, longest + last_block + 1), np.inf)
        arrived = padded[:, :, longest:]
        earlier = _windows(padded, longest, last_block + 1)
        by_span = stages[MIDDLE, :, 1 : longest + 1, None, None]
        for p in range(1, len(order)):
            (reached[:p] + hops[:p, p, None, None]).min(axis=0, out=arrived[p])
            longer = (earlier[p] + by_span[p]).min(axis=0)
            np.minimum(reached[p], longer, out=reached[p])
        ends = arrived[:, :, last_block - longest : last_block]
        ended = (ends[:, :, ::-1] + stages[LAST, :, None, 1 : longest + 1]).min(axis=2)
        alone = enter + stages[ONLY][:, None, last_block]
        totals = np.minimum(ended, alone) + leave
        return _Solved(order, limited, stages, hops, reached, arrived, totals)


def _windows(padded: Floats, longest: int, length: int) -> Floats:
    """View `[p, n, g, l]` of `padded[p, g, longest + l - n]` for spans n = 1 .. longest."""
    peers, groups, _ = padded.shape
    by_peer, by_group, by_block = padded.strides
    return np.lib.stride_tricks.as_strided(
        padded[:, :, longest - 1 :],
        shape=(peers, longest, groups, length),
        strides=(by_peer, -by_block, by_group, by_block),
        writeable=False,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Solved:
    """The filled table, from which the route is read backwards."""

    order: Ints
    limited: Limited
    stages: Floats
    hops: Floats
    reached: Floats
    arrived: Floats
    totals: Floats

    @property
    def least(self) -> float:
        """The least latency of all; infinite when there is no route."""
        return float(self.totals.min())

    def route(self) -> tuple[tuple[int, int], ...]:
        """Peers (by their index in the cluster) and blocks of the best route."""
        p, g = (int(i) for i in np.unravel_index(int(self.totals.argmin()), self.totals.shape))
        blocks = self.stages.shape[2] - 1
        ended = self.arrived[p, g, ::-1] + self.stages[LAST, p]
        entrance = self.limited.enter_s[g, self.order]
        if entrance[p] + self.stages[ONLY, p, blocks] <= ended.min():
            return ((int(self.order[p]), blocks),)
        spans: list[tuple[int, int]] = []
        count = int(ended.argmin())
        while True:
            spans.append((int(self.order[p]), count))
            blocks -= count
            p = int((self.reached[:p, g, blocks] + self.hops[:p, p]).argmin())
            first_s = entrance[p] + self.stages[FIRST, p, blocks]
            if first_s <= self.reached[p, g, blocks]:
                spans.append((int(self.order[p]), blocks))
                return tuple(reversed(spans))
            before = self.arrived[p, g, :blocks][::-1] + self.stages[MIDDLE, p, 1 : blocks + 1]
            count = int(before.argmin()) + 1
