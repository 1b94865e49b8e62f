"""Rows that occur more than once in a matrix travel once: prompts that begin alike make them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST_SHARE = 8
"""Worth it from one repeat in so many rows: finding them costs a copy of the others."""


def find_repeats(
    words: NDArray[np.unsignedinteger],
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Which rows of `[R, D]` words to keep, and for every row which of these it is.

    None when too few repeat. Rows are equal bit for bit.
    """
    rows, width = words.shape
    if rows < 2 or not width:
        return None
    # Two words tell nearly all rows apart, at a hundredth of the cost of sorting whole rows.
    keys = words[:, width // 3].astype(np.uint64) << np.uint64(32) | words[:, -1]
    if (rows - len(set(keys.tolist()))) * LEAST_SHARE < rows:
        return None
    whole = np.ascontiguousarray(words).view(np.dtype((np.void, width * words.dtype.itemsize)))[
        :, 0
    ]
    _, first, index = np.unique(whole, return_index=True, return_inverse=True)
    if (rows - len(first)) * LEAST_SHARE < rows:
        return None
    order = np.argsort(first)  # in order of appearance: neighbours stay neighbours
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[index.reshape(-1)]
