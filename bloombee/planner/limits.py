"""Best trade between latency and bottleneck: exact, with few solves.

A pipelined plan costs g(latency, bottleneck), growing in both. For a cap on the bottleneck
the least latency is a plain sum and easy to find; as the cap falls the latency rises. The
Pareto front over (bottleneck, latency) has its points at the times of single resources, so
caps are taken from those. `best_cap` halves intervals of caps, best bound first: between two
caps no plan is quicker than the latency at the upper and the bottleneck at the lower allow.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from bloombee.planner.costs import Costs
    from bloombee.planner.profiles import Floats

    Score = Callable[[Floats, float], Floats]

FLAT = 1e-12
Answer = TypeVar("Answer")
Kept = TypeVar("Kept", covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class Limited:
    """Costs without the resources that are busy for longer than a cap.

    Of each link only the quickest codec is left: `stage_s[role, p, n]`, `hop_s[p, q]`,
    `enter_s[g, p]`, `leave_s[g, p]`.
    """

    stage_s: Floats
    hop_s: Floats
    enter_s: Floats
    leave_s: Floats


def limit(costs: Costs, cap_s: float) -> Limited:
    """What is left of `costs` when no resource may be busy for longer than `cap_s`."""
    if np.isinf(cap_s):
        return Limited(
            costs.stage_s,
            costs.hop_s.min(axis=0),
            costs.enter_s.min(axis=0),
            costs.leave_s.min(axis=0),
        )
    return Limited(
        np.where(costs.stage_s <= cap_s, costs.stage_s, np.inf),
        _allowed(costs.hop_s, costs.hop_busy_s, cap_s),
        _allowed(costs.enter_s, costs.enter_busy_s, cap_s),
        _allowed(costs.leave_s, costs.leave_busy_s, cap_s),
    )


def _allowed(seconds: Floats, busy: Floats, cap_s: float) -> Floats:
    return np.where(busy <= cap_s, seconds, np.inf).min(axis=0)


def caps(costs: Costs) -> Floats:
    """Every time that can be the bottleneck of a plan, ascending."""
    roles = costs.stage_s[:1] if costs.same_roles else costs.stage_s
    values = np.concatenate(
        [
            roles.ravel(),
            costs.hop_busy_s.ravel(),
            costs.enter_busy_s.ravel(),
            costs.leave_busy_s.ravel(),
        ]
    )
    values = np.unique(values[np.isfinite(values)])
    return values[np.searchsorted(values, lowest_cap(costs)) :]


def lowest_cap(costs: Costs) -> float:
    """A bottleneck that no plan can go below: all peers together must hold all blocks."""
    quickest = costs.stage_s[0] if costs.same_roles else costs.stage_s.min(axis=0)
    # The least time of a span of at least n blocks, so that it never falls with n.
    envelope = np.minimum.accumulate(quickest[:, ::-1], axis=1)[:, ::-1]
    times = np.sort(envelope[:, 1:].ravel())
    needed = costs.blocks - 1
    return float(times[needed]) if needed < len(times) else float("inf")


class Solve(Protocol[Kept]):
    """Solves for a cap: latencies `[k]` of k alternatives, and what else the caller keeps."""

    def __call__(self, cap_s: float) -> tuple[Floats, Kept]: ...


@dataclass(frozen=True, slots=True)
class Best(Generic[Answer]):
    """The winner: its score, the cap it was found at, its alternative, the solver's answer."""

    score: float
    cap_s: float
    index: int
    answer: Answer


def best_cap(
    candidates: Floats,
    solve: Solve[Answer],
    score: Score,
    bound: float = float("inf"),
) -> Best[Answer] | None:
    """The best alternative over all caps, or None when none scores below `bound`.

    `score(latencies, bottleneck)` grows in both; `candidates` ascend.
    """
    best: Best[Answer] | None = None
    least = bound
    intervals: list[tuple[float, int, int, Floats | None]] = [(0.0, 0, len(candidates), None)]
    while intervals:
        promise, low, high, above = heapq.heappop(intervals)
        if promise >= least or low >= high:
            continue
        middle = high - 1
        if above is not None:
            high, middle = _split(candidates, low, high, partial(_hope, score, above), least)
        cap = float(candidates[middle])
        latencies, answer = solve(cap)
        scores = score(latencies, cap)
        index = int(scores.argmin())
        if scores[index] < least:
            least = float(scores[index])
            best = Best(least, cap, index, answer)
        for start, end, ceiling in ((low, middle, latencies), (middle + 1, high, above)):
            if start < end and ceiling is not None:
                hope = _hope(score, ceiling, float(candidates[start]))
                if hope < least:
                    heapq.heappush(intervals, (hope, start, end, ceiling))
    return best


def _hope(score: Score, latencies: Floats, cap_s: float) -> float:
    """No plan with at least these latencies and this bottleneck scores better."""
    return float(score(latencies, cap_s).min())


def _split(
    candidates: Floats, low: int, high: int, hope: Callable[[float], float], least: float
) -> tuple[int, int]:
    """Where an interval of caps really ends, and which of its caps to solve next.

    Caps whose hope isn't below `least` are cut off. Where the hope stays flat at first (the
    latency rules, not the bottleneck), the last flat cap answers for all; else the middle.
    """
    high = _first(candidates, low + 1, high, lambda cap: hope(cap) >= least)
    flat = hope(float(candidates[low])) * (1 + FLAT)
    rising = _first(candidates, low + 1, high, lambda cap: hope(cap) > flat)
    return high, rising - 1 if rising - 1 > low else (low + high) // 2


def _first(candidates: Floats, low: int, high: int, true_from: Callable[[float], bool]) -> int:
    """The first index in `[low, high)` where a condition that stays true is; else `high`."""
    while low < high:
        middle = (low + high) // 2
        if true_from(float(candidates[middle])):
            high = middle
        else:
            low = middle + 1
    return low
