"""Which slots are free. Neighbours are worth having: adjacent rows attend as one batch."""

from __future__ import annotations

from collections.abc import Iterable


class Slots:
    """Hands out slots 0..count-1, lowest first, adjacent where it can."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = set(range(count))

    def take(self, wanted: int) -> list[int] | None:
        """`wanted` slots, the lowest run of neighbours if there is one.

        None when too few are free; nothing is taken then.
        """
        if wanted > len(self.free):
            return None
        ordered = sorted(self.free)
        chosen = ordered[:wanted]
        for start in range(len(ordered) - wanted + 1):
            if ordered[start + wanted - 1] - ordered[start] == wanted - 1:
                chosen = ordered[start : start + wanted]
                break
        self.free.difference_update(chosen)
        return chosen

    def give(self, slots: Iterable[int]) -> None:
        """Take slots back."""
        self.free.update(slots)
