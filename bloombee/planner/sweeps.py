"""Shortest paths over (block, server): the least cost of every way to every border.

`reached[i, k, g]` is the least cost of computing the first i blocks so that holding k computes
the last of them, `arrived[i, k, g]` that of coming to k with i blocks done; g counts ways
of entering and leaving that are solved side by side. A stage's cost is linear in its blocks:

    reached[j, k] = min over i of  arrived[i, k] + fixed[k] + unit[k] (j - i)
    arrived[i, k] = min over l of  reached[i, l] + hop[l, k]

so without a cap on stages a running minimum does for the first, and of the second only those
holdings count that end, or begin, at the border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bloombee.core import Span
    from bloombee.planner.route_costs import Floats, Ints, RouteCosts

Legs = tuple[tuple[int, int, int], ...]
"""Holding, first block, and the block after the last, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """A solved table; blocks are counted from that at which the route begins."""

    costs: RouteCosts
    first_block: int
    reached: Floats
    arrived: Floats
    hop_s: Floats
    longest: Floats
    totals: Floats

    def legs(self, holding: int, group: int) -> Legs:
        """The best route of `group` whose last stage is `holding`, read backwards."""
        found: list[tuple[int, int, int]] = []
        at, k = len(self.reached) - 1, holding
        costs = self.costs
        stage_s = costs.fixed_s + costs.queue_s
        while True:
            least = max(0, at - int(self.longest[k]))
            lengths = at - np.arange(least, at)
            ways = self.arrived[least:at, k, group] + stage_s[k] + costs.unit_s[k] * lengths
            begin = least + int(ways.argmin())
            found.append((k, self.first_block + begin, self.first_block + at))
            if begin == 0:
                return tuple(reversed(found))
            at = begin
            k = int((self.reached[at, :, group] + self.hop_s[:, k]).argmin())


def sweep(
    costs: RouteCosts,
    whole: Span,
    enter_s: Floats,
    leave_s: Floats,
    cap_s: float = float("inf"),
) -> Sweep:
    """Solve for `enter_s[k, g]` and `leave_s[k, g]`, no resource being busy for over `cap_s`."""
    blocks, count, groups = len(whole), len(costs), enter_s.shape[1]
    hop_s = _passable(costs, cap_s)
    start, end = costs.start - whole.start, costs.end - whole.start
    reached = np.full((blocks + 1, count, groups), np.inf)
    arrived = np.full((blocks, count, groups), np.inf)
    stages = _Stages(costs, arrived, cap_s)
    for at in range(blocks):
        here = np.flatnonzero((start <= at) & (at < end))
        if at == 0:
            arrived[0, here] = enter_s[here]
        else:
            ending = np.flatnonzero(np.isfinite(reached[at]).any(axis=1))
            if len(ending):
                ways = reached[at, ending][:, None, :] + hop_s[ending[:, None], here][:, :, None]
                arrived[at, here] = ways.min(axis=0)
        reached[at + 1, here] = stages.after(at, here)
    return Sweep(
        costs, whole.start, reached, arrived, hop_s, stages.longest, reached[blocks] + leave_s
    )


def _passable(costs: RouteCosts, cap_s: float) -> Floats:
    if np.isinf(cap_s):
        return costs.hop_s
    return np.where(costs.hop_busy_s <= cap_s, costs.hop_s, np.inf)


class _Stages:
    """The least cost of having computed one block more, whenever its stage began."""

    def __init__(self, costs: RouteCosts, arrived: Floats, cap_s: float) -> None:
        self._arrived = arrived
        self._unit_s = costs.unit_s[:, None]
        self._fixed_s = (costs.fixed_s + costs.queue_s)[:, None]
        self._begun = np.full(arrived.shape, np.inf)
        lengths = costs.end - costs.start
        # A hair more, so that a stage that is exactly as long as the cap passes.
        room = (cap_s * (1 + 1e-9) - costs.fixed_s) / costs.unit_s
        self.longest = np.minimum(np.floor(room), lengths)
        self._is_free = bool((self.longest >= lengths).all())

    def after(self, at: int, here: Ints) -> Floats:
        """Costs `[h, g]` at border `at + 1` of the holdings `here`; `arrived[at]` is known."""
        unit_s = self._unit_s[here]
        begun = self._arrived[at, here] + (self._fixed_s[here] - unit_s * at)
        if self._is_free:
            # The least so far is kept in place of what began at this border.
            if at:
                begun = np.minimum(begun, self._begun[at - 1, here])
            self._begun[at, here] = begun
            return begun + unit_s * (at + 1)
        self._begun[at, here] = begun
        longest = self.longest[here]
        from_block = max(0, at + 1 - int(longest.max(initial=0)))
        fits = np.arange(from_block, at + 1)[:, None] >= at + 1 - longest
        kept = self._begun[from_block : at + 1, here]
        return np.where(fits[:, :, None], kept, np.inf).min(axis=0, initial=np.inf) + unit_s * (
            at + 1
        )
