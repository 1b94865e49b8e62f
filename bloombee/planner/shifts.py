"""Shifting spans over a row of blocks: which shift takes most off what blocks lack of a target.

All servers and all places are tried at once, with prefix sums: what a window gains and
what another loses are differences of two entries, also where the two overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bloombee.core import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

MOST_TIES = 256
"""Shifts that are worth the same and are compared by what they leave of the row."""
CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Shift:
    """Span number `index` goes to `to`, which takes `worth` off what blocks lack."""

    index: int
    to: Span
    worth: float


class Shifts:
    """Spans that give `rates` to the blocks below them, and may go elsewhere.

    `total` is what all blocks have, of these spans and of others; `held` how many hold
    each now. A shift leaves no block without any, and none with less than the weakest
    has: so a row of shifts goes up only, and ends. Changes nothing that it is given.
    """

    def __init__(self, spans: Sequence[Span], rates: Floats, total: Floats, held: Ints) -> None:
        self._starts = np.array([span.start for span in spans])
        self._ends = np.array([span.end for span in spans])
        self._rates = rates
        self._total = total
        self._held = held

    @property
    def floor(self) -> float:
        """What the weakest block has."""
        return float(self._total.min())

    def lack(self, target: float) -> float:
        """What blocks lack of `target`, together."""
        return float(np.maximum(target - self._total, 0).sum())

    def reach(self, target: float, most: int) -> list[Shift] | None:
        """At most so many shifts, the best first, after which each block has `target`.

        None when there are none, as far as taking the best one each time can tell.
        """
        reserves = np.sort(self._rates * (self._ends - self._starts))[-most:].sum()
        if self._total.mean() < target or reserves < self.lack(target) * (1 - CLOSE):
            return None
        now, steps = self, list[Shift]()
        while now.floor < target * (1 - CLOSE):
            step = now.best(target) if len(steps) < most else None
            if step is None:
                return None
            steps.append(step)
            now = now.shifted(step)
        return steps

    def after(self, steps: Sequence[Shift]) -> float:
        """What the weakest block has after these shifts."""
        now = self
        for step in steps:
            now = now.shifted(step)
        return now.floor

    def shifted(self, step: Shift) -> Shifts:
        """How things are after a shift."""
        index, to, rate = step.index, step.to, self._rates[step.index]
        now = Shifts([], self._rates, self._total.copy(), self._held.copy())
        now._starts, now._ends = self._starts.copy(), self._ends.copy()
        left = slice(self._starts[index], self._ends[index])
        now._total[left] -= rate
        now._held[left] -= 1
        now._total[to.start : to.end] += rate
        now._held[to.start : to.end] += 1
        now._starts[index], now._ends[index] = to.start, to.end
        return now

    def best(
        self, target: float, row: Floats | None = None, rates: Floats | None = None
    ) -> Shift | None:
        """The shift that takes most off what blocks lack of `target`; None when none does.

        Of those that take as much, the one that leaves the weakest blocks of `row` (what
        spans give `rates` to) strongest; of these the first span, and the lowest place.
        """
        worth = self._worths(target)
        most = worth.max(initial=0.0)
        if most <= CLOSE * target:
            return None
        ties = np.argwhere(worth >= most - CLOSE * target)[:MOST_TIES]
        row = self._total if row is None else row
        rates = self._rates if rates is None else rates
        blocks = np.arange(len(row))
        index, start = ties[:, :1], ties[:, 1:]
        width = (self._ends - self._starts)[index]
        left = (blocks >= self._starts[index]) & (blocks < self._ends[index])
        taken = (blocks >= start) & (blocks < start + width)
        after = np.sort(row + rates[index] * (taken.astype(float) - left), axis=1)
        after = np.round(after, 9)
        chosen = max(range(len(ties)), key=lambda i: (tuple(after[i]), -i))
        mover, place = (int(value) for value in ties[chosen])
        span = Span(place, place + int(width[chosen, 0]))
        return Shift(mover, span, float(worth[mover, place]))

    def _worths(self, target: float) -> Floats:
        """By span and first block: how much less blocks lack; -inf where it can't go."""
        rates = self._rates[:, None]
        lack = np.maximum(target - self._total, 0.0)[None, :]
        gained = _prefix(np.minimum(rates, lack))
        lost = _prefix(np.maximum(target - self._total[None, :] + rates, 0.0) - lack)
        weak = self._total[None, :] - rates < self.floor * (1 - CLOSE)
        alone = _prefix(((self._held <= 1)[None, :] | weak).astype(float))
        old, end = self._starts[:, None], self._ends[:, None]
        new = np.arange(len(self._total))[None, :]
        to = np.minimum(new + end - old, len(self._total))
        low, high = np.maximum(old, new), np.minimum(end, to)
        high = np.maximum(low, high)
        worth = _sum(gained, new, to) - _sum(gained, low, high)
        worth -= _sum(lost, old, end) - _sum(lost, low, high)
        leaves = _sum(alone, old, end) - _sum(alone, low, high)
        fits = (new + end - old <= len(self._total)) & (leaves < 0.5)
        return np.where(fits, worth, -np.inf)


def _prefix(rows: Floats) -> Floats:
    """Prefix sums of each row, from 0 on."""
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)


def _sum(prefix: Floats, start: Ints, end: Ints) -> Floats:
    """By row: the sums of `[start, end)`."""
    if len(prefix) == 1:
        return prefix[0][end] - prefix[0][start]
    start, end = np.broadcast_arrays(start, end)
    if start.shape[0] == 1:
        return prefix[:, end[0]] - prefix[:, start[0]]
    return np.take_along_axis(prefix, end, 1) - np.take_along_axis(prefix, start, 1)
