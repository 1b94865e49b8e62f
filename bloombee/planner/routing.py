"""The route of least cost for one session, over servers that hold parts of the model.

A shortest path (`sweeps`), for costs add up; with three things that a path doesn't know:

- The ring. With the server head each token goes from the last stage to the first, so first
  stages are tried one after the other, most promising first, until none can win.
- The bottleneck of sessions that follow each other: least latency under a cap on every
  resource, for the best of caps.
- A server takes part in a session once. Where the path comes back to one, three narrower
  problems together have all routes that don't, and the best of them wins.

Clients that see the same would all take the same servers. So each multiplies what leads through
a server by a factor of its own, up to 1 + SPREAD: its route then costs at most so much more
than the best one, and any within that may be taken.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bloombee.core import Route, Span, Stage
from bloombee.planner.route_costs import costs_of
from bloombee.planner.sweeps import sweep
from bloombee.planner.workload import Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.planner.hearsay import Knowledge
    from bloombee.planner.route_costs import Errand, Floats, Ints, RouteCosts, Server
    from bloombee.planner.sweeps import Legs, Sweep

SPREAD = 0.05
NEAR, MOST_CAPS = 0.02, 12
"""A search over bottlenecks ends so near to the best, or after so many."""
RINGS = 8
"""First stages that are tried side by side."""
MOST_PARTINGS, MOST_PIPED = 32, 3
"""Narrower problems that are solved because a server came twice; then it is made to stay. Those
with a bottleneck take longer."""


@dataclass(frozen=True, slots=True)
class Found:
    """A route: `latency_s` a token, busiest resource, and the score that the objective gives."""

    route: Route
    latency_s: float
    bottleneck_s: float
    score_s: float


def spread_factors(chances: Sequence[float]) -> list[float]:
    """From numbers in [0, 1), one for each server, what makes clients differ."""
    return [1 + SPREAD * chance for chance in chances]


def find_route(
    servers: Sequence[Server],
    whole: Span,
    errand: Errand,
    known: Knowledge,
    factors: Sequence[float] | None = None,
) -> Found | None:
    """The best route over `whole`; None when the servers leave a gap.

    Costs in it are multiplied by `factors`, as the choice saw them.
    """
    holders = [s for s in servers if s.span.start < whole.end and whole.start < s.span.end]
    if not holders:
        return None
    if factors is not None:
        of = dict(zip((s.peer for s in servers), factors, strict=True))
        factors = [of[s.peer] for s in holders]
    problem = _problem(whole, errand, costs_of(holders, whole, errand, known, factors))
    legs = problem.solve()
    return None if legs is None else problem.found(legs, holders)


def token_s(route: Route, servers: Sequence[Server], errand: Errand, known: Knowledge) -> float:
    """Seconds that a token of every sequence takes over a route, whose `servers` are in order.

    With `prompt_tokens` 0 the errand has no share of a prompt in it.
    """
    costs = costs_of(servers, route.span, errand, known)
    problem = _problem(route.span, errand, costs)
    legs = tuple((i, s.span.start, s.span.end) for i, s in enumerate(route.stages))
    return problem.latency_s(legs)


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """Some holdings, or parts of them, and the costs of `all` by owner: legs name owners."""

    whole: Span
    errand: Errand
    all: RouteCosts
    costs: RouteCosts

    def narrowed(self, holdings: Ints, start: Ints, end: Ints) -> _Problem:
        """With only these, cut to `[start, end)`."""
        return replace(self, costs=self.costs.take(holdings, start, end))

    def solve(self) -> Legs | None:
        """The best legs in which no server comes twice."""
        best: Legs | None = None
        least = float("inf")
        open_problems: list[_Problem] = [self]
        solved = 0
        piped = self.errand.objective is Objective.THROUGHPUT
        most = MOST_PIPED if piped else MOST_PARTINGS
        while open_problems:
            problem = open_problems.pop()
            legs = problem.relaxed(least)
            solved += 1
            if legs is None or self.score(legs) >= least:
                continue  # leaving out that rule, nothing better is in it
            clash = _clash(legs)
            single = legs if clash is None else _staying(legs)
            if (score := self.score(single)) < least:
                best, least = single, score
            if clash is not None and solved < most:
                open_problems.extend(problem.parted(clash))
        return best

    def relaxed(self, bound: float) -> Legs | None:
        """The best legs, if any score below `bound`; a server may come twice."""
        if self.errand.objective is Objective.THROUGHPUT:
            return self._pipelined(bound)
        return self._direct() if self.costs.ring_s is None else self._around()

    def _direct(self, cap_s: float = float("inf")) -> Legs | None:
        solved = self._ahead(cap_s)
        return None if solved is None else self._read(solved)

    def _ahead(self, cap_s: float = float("inf")) -> Sweep | None:
        costs = self.costs
        if not len(costs):
            return None
        return sweep(costs, self.whole, costs.enter_s[:, None], costs.leave_s[:, None], cap_s)

    def _read(self, solved: Sweep) -> Legs | None:
        last = int(solved.totals[:, 0].argmin())
        return self._owned(solved.legs(last, 0)) if np.isfinite(solved.totals[last, 0]) else None

    def _owned(self, legs: Legs) -> Legs:
        return tuple((int(self.costs.owner[k]), start, end) for k, start, end in legs)

    def _around(self) -> Legs | None:
        """Of all first stages the one whose ring closes best."""
        costs, ring_s = self.costs, self.costs.ring_s
        if ring_s is None or not len(costs):
            return None
        promises = self._promises(ring_s)
        order = np.argsort(promises, kind="stable")
        best: Legs | None = None
        least = float("inf")
        for index in range(0, len(order), RINGS):
            firsts = order[index : index + RINGS]
            if not promises[firsts[0]] < least:
                break
            enter_s = np.full((len(costs), len(firsts)), np.inf)
            enter_s[firsts, np.arange(len(firsts))] = costs.enter_s[firsts]
            leave_s = costs.leave_s[:, None] + ring_s[:, firsts]
            solved = sweep(costs, self.whole, enter_s, leave_s)
            last, group = (
                int(i) for i in np.unravel_index(int(solved.totals.argmin()), solved.totals.shape)
            )
            if solved.totals[last, group] < least:
                least = float(solved.totals[last, group])
                best = self._owned(solved.legs(last, group))
        return best

    def _promises(self, ring_s: Floats) -> Floats:
        """What a route that begins with each holding costs at least."""
        costs, span = self.costs, self.whole
        turned = costs.turned(span)
        solved = sweep(turned, span, turned.enter_s[:, None], turned.leave_s[:, None])
        ends = costs.end == span.end
        closing = np.where(ends[:, None], ring_s, np.inf)
        alone = (costs.start == span.start) & ends
        np.fill_diagonal(closing, np.where(alone, 0.0, np.inf))
        return solved.totals[:, 0] + closing.min(axis=0)

    def _pipelined(self, bound: float) -> Legs | None:
        """Least latency under a cap on every resource, for the best of caps.

        Between two caps no route is quicker than the latency at the upper and the bottleneck
        at the lower one allow; intervals of caps are halved, the most promising first.
        """
        ahead = self._ahead()
        best = None if ahead is None else self._read(ahead)
        if ahead is None or best is None:
            return None
        least, low_s = self.score(best), self._least_cap()
        few = self._without_hopeless(ahead, min(least, bound), low_s)
        intervals = [(0.0, low_s, self.bottleneck_s(best), self.latency_s(best))]
        solved = 0
        while intervals and solved < MOST_CAPS:
            promise, low_s, high_s, latency_s = heapq.heappop(intervals)
            if promise >= least * (1 - NEAR):
                break
            solved += 1
            useful_s = (least - latency_s) / (self.errand.in_flight - 1)
            cap_s = (low_s + min(high_s, useful_s)) / 2
            halves = [(cap_s, high_s, latency_s)]
            legs = few._direct(cap_s)
            if legs is not None:
                if self.score(legs) < least:
                    best, least = legs, self.score(legs)
                halves.append((low_s, min(cap_s, self.bottleneck_s(legs)), self.latency_s(legs)))
            for low, high, latency in halves:
                if low < high:
                    hope = latency + (self.errand.in_flight - 1) * low
                    heapq.heappush(intervals, (hope, low, high, latency))
        return best

    def _without_hopeless(self, ahead: Sweep, least: float, low_s: float) -> _Problem:
        """Without holdings of which no route can score below `least`."""
        costs, span = self.costs, self.whole
        turned = costs.turned(span)
        behind = sweep(turned, span, turned.enter_s[:, None], turned.leave_s[:, None])
        through_s = (ahead.reached[1:, :, 0] + behind.arrived[::-1, :, 0]).min(axis=0)
        hopes = through_s + (self.errand.in_flight - 1) * low_s
        kept = np.flatnonzero(hopes < least)
        return self.narrowed(kept, costs.start[kept], costs.end[kept])

    def _least_cap(self) -> float:
        """A bottleneck below which no server computes some block."""
        costs, whole = self.costs, self.whole
        least = 0.0
        alone_s = costs.fixed_s + costs.unit_s
        for block in range(whole.start, whole.end):
            holds = (costs.start <= block) & (block < costs.end)
            least = max(least, float(alone_s[holds].min(initial=float("inf"))))
        return least

    # Scores ---------------------------------------------------------------------------

    def latency_s(self, legs: Legs) -> float:
        """Of one token over these legs."""
        costs = self.all
        stages = sum(
            costs.fixed_s[k] + costs.queue_s[k] + costs.unit_s[k] * (end - start)
            for k, start, end in legs
        )
        hops = sum(
            costs.hop_s[left[0], right[0]] for left, right in zip(legs, legs[1:], strict=False)
        )
        first, last = legs[0][0], legs[-1][0]
        ring = 0.0 if costs.ring_s is None else costs.ring_s[last, first]
        return float(costs.enter_s[first] + stages + hops + costs.leave_s[last] + ring)

    def bottleneck_s(self, legs: Legs) -> float:
        """The busiest stage or link."""
        costs = self.all
        busy = [costs.fixed_s[k] + costs.unit_s[k] * (end - start) for k, start, end in legs]
        for left, right in zip(legs, legs[1:], strict=False):
            busy.append(costs.hop_busy_s[left[0], right[0]])
        return float(max(busy))

    def score(self, legs: Legs) -> float:
        """What the objective makes of legs."""
        latency_s = self.latency_s(legs)
        if self.errand.objective is not Objective.THROUGHPUT:
            return latency_s
        return latency_s + (self.errand.in_flight - 1) * self.bottleneck_s(legs)

    def found(self, legs: Legs, servers: Sequence[Server]) -> Found:
        """The answer."""
        stages = tuple(Stage(servers[k].peer, Span(start, end)) for k, start, end in legs)
        return Found(Route(stages), self.latency_s(legs), self.bottleneck_s(legs), self.score(legs))

    # Servers that come twice --------------------------------------------------------

    def parted(self, clash: _Clash) -> list[_Problem]:
        """Problems that together have all routes in which the server comes once.

        It takes no part from its second stage on, or none before the end of its first, or it
        computes all between the two.
        """
        costs = self.costs
        its, everyone = costs.owner == clash.owner, np.arange(len(costs))
        before = np.where(its, np.minimum(costs.end, clash.again), costs.end)
        after = np.where(its, np.maximum(costs.start, clash.left), costs.start)
        others = everyone[~its]
        around = np.concatenate([everyone[its], others, others])
        starts = np.concatenate(
            [costs.start[its], costs.start[others], np.maximum(costs.start[others], clash.again)]
        )
        ends = np.concatenate(
            [costs.end[its], np.minimum(costs.end[others], clash.left), costs.end[others]]
        )
        cuts = ((everyone, costs.start, before), (everyone, after, costs.end))
        return [self.narrowed(*cut) for cut in (*cuts, (around, starts, ends))]


def _problem(whole: Span, errand: Errand, costs: RouteCosts) -> _Problem:
    return _Problem(whole, errand, costs, costs)


@dataclass(frozen=True, slots=True)
class _Clash:
    """A server that computes blocks up to `left`, and others from `again` on."""

    owner: int
    left: int
    again: int


def _clash(legs: Legs) -> _Clash | None:
    ends: dict[int, int] = {}
    for owner, start, end in legs:
        if owner in ends:
            return _Clash(owner, ends[owner], start)
        ends[owner] = end
    return None


def _staying(legs: Legs) -> Legs:
    """Legs in which a server that comes twice computes all between, for it has all of that."""
    kept: list[tuple[int, int, int]] = []
    for owner, start, end in legs:
        at = next((i for i, leg in enumerate(kept) if leg[0] == owner), None)
        if at is not None:
            start = kept[at][1]
            del kept[at:]
        kept.append((owner, start, end))
    return tuple(kept)
