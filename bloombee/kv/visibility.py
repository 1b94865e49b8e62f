"""Which slots a new token sees, as plain boolean arrays. Pure numpy.

A row's new tokens lie in slots `[first, first + count)`. In a chain, token i has
position `first + i` and sees everything before it. In a tree it sees the held
tokens and its ancestors, at position `first + depth`. A sliding window w leaves
positions greater than its own minus w; held tokens lie at position = slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def ancestors(count: int, parents: Sequence[int] | None) -> Mask:
    """`[count, count]`: whether token j is token i or an ancestor of it."""
    if parents is None:
        return np.tri(count, dtype=np.bool_)
    seen = np.eye(count, dtype=np.bool_)
    for index, parent in enumerate(parents):
        if parent >= 0:
            seen[index] |= seen[parent]
    return seen


def visible(first: int, count: int, parents: Sequence[int] | None, window: int | None) -> Mask:
    """`[count, first + count]`: whether new token i sees slot j."""
    family = ancestors(count, parents)
    seen = np.ones((count, first + count), dtype=np.bool_)
    seen[:, first:] = family
    if window is not None:
        depth = family.sum(axis=1) - 1
        slot_position = np.concatenate((np.arange(first), first + depth))
        seen &= slot_position[None, :] > (first + depth)[:, None] - window
    return seen
