"""Memory for frames and tensors that is used again when nobody reads it any more.

Payloads are large enough for the C library to take their memory from the system and give
it back each time, and a page touched for the first time costs as much as coding it.
"""

from __future__ import annotations

import sys
import threading

SMALL_BYTES = 32 << 10
"""Below this the C library keeps memory by itself."""
LARGEST_BYTES = 8 << 20
MOST = 4
"""So many of so many bytes stay with each thread that codes."""
_STEP_BYTES = 64 << 10


def _references(kept: list[bytearray], number: int) -> int:
    return sys.getrefcount(kept[number])


_UNREAD = _references([bytearray()], 0)
"""References to memory that nobody but its lender knows, however Python counts."""


class Lender(threading.local):
    """Lends memory and sees by its references when it is free again."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def lend(self, size: int) -> bytearray:
        """At least `size` bytes of any value; free when the last view of them is gone."""
        if not SMALL_BYTES <= size <= LARGEST_BYTES:
            return bytearray(size)
        for number in range(len(self._kept)):
            if _references(self._kept, number) == _UNREAD:
                if len(self._kept[number]) < size:
                    self._kept[number] = bytearray(_rounded(size))
                return self._kept[number]
        fresh = bytearray(_rounded(size))
        if len(self._kept) < MOST:
            self._kept.append(fresh)
        return fresh


def _rounded(size: int) -> int:
    return -(-size // _STEP_BYTES) * _STEP_BYTES
