"""Rows that occur more than once in a matrix travel once: prompts that begin alike make them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bloombee.compression.planes import Words

LEAST_SHARE = 8
"""Worth it from one repeat in so many rows: finding them costs a copy of the others."""
LEAST_ROWS = 64
"""Looked at: steps of decoding have fewer, and what they save is less than the look costs."""
_KEY_BYTES = 8


def find_repeats(words: Words) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Which rows of `[R, D]` words to keep, and for every row which of these it is.

    None when too few repeat, and for few rows. Rows are equal bit for bit.
    """
    rows, width = words.shape
    if rows < LEAST_ROWS or not width:
        return None
    if (rows - _distinct_keys(words)) * LEAST_SHARE < rows:
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


def _distinct_keys(words: Words) -> int:
    """At most as many as there are distinct rows, and nearly always as many.

    Some bytes of each row tell it apart at a hundredth of the cost of sorting whole rows.
    """
    rows, width = words.shape
    row_bytes = width * words.dtype.itemsize
    if row_bytes % _KEY_BYTES:
        keys = words[:, width // 3]
    else:
        keys = words.view(np.uint64)[:, row_bytes // _KEY_BYTES // 3]
    ordered = np.sort(keys)
    return rows - int(np.count_nonzero(ordered[1:] == ordered[:-1]))
