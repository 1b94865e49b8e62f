"""The packed table: how `[T, D]` rows map to sequences and positions.

All new tokens of all sequences of a micro-batch lie back to back in one
`[T, D]` matrix. Row r of the table says: the next `counts[r]` tokens belong to
`sequences[r]` and extend its KV from slot `first_positions[r]` on. Without
parents the tokens form a chain. With parents (verify steps) the tokens of a row
form a forest: `parents[t]` is the index *within its row* of the parent of token
t, or -1 when it hangs on the last token already in the KV. A parent always
precedes its children.

Slot and position differ only in trees: token i of a row lies in KV slot
`first_position + i`, and its position (rotary, learned) is
`first_position + depth(i)`, where a root has depth 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence's share of a micro-batch: packed rows `[offset, offset + count)`."""

    sequence: int
    first_position: int
    count: int
    offset: int
    parents: tuple[int, ...] | None


@dataclass(frozen=True)
class PackedTable:
    """Which sequence and position each of the T packed tokens belongs to.

    Raises ValueError when lengths differ, a count is not positive, a position is
    negative, a sequence appears twice, or a parent does not precede its child.
    """

    sequences: tuple[int, ...]
    first_positions: tuple[int, ...]
    counts: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        rows = len(self.sequences)
        if len(self.first_positions) != rows or len(self.counts) != rows or not rows:
            raise ValueError("a packed table needs equally many sequences, positions and counts")
        if len(set(self.sequences)) != rows or min(self.sequences) < 0:
            raise ValueError("sequences must be distinct and not negative")
        if min(self.counts) < 1 or min(self.first_positions) < 0:
            raise ValueError("counts must be positive and positions not negative")
        if self.parents is not None:
            self._check_parents(self.parents)

    def _check_parents(self, parents: tuple[int, ...]) -> None:
        if len(parents) != self.tokens:
            raise ValueError(f"{len(parents)} parents for {self.tokens} tokens")
        for row in self.rows():
            for index, parent in enumerate(row.parents or ()):
                if not -1 <= parent < index:
                    raise ValueError(
                        f"token {index} of sequence {row.sequence} has parent {parent}, "
                        "which does not precede it"
                    )

    @cached_property
    def tokens(self) -> int:
        """T, the number of packed tokens."""
        return sum(self.counts)

    def rows(self) -> Iterator[PackedRow]:
        """The rows in order, with their offset into the packed matrix."""
        offset = 0
        for sequence, first, count in zip(
            self.sequences, self.first_positions, self.counts, strict=True
        ):
            parents = None if self.parents is None else self.parents[offset : offset + count]
            yield PackedRow(sequence, first, count, offset, parents)
            offset += count

    @cached_property
    def is_decode(self) -> bool:
        """Whether every row is one chained token: the shape of plain decoding."""
        return self.parents is None and self.tokens == len(self.counts)

    @cached_property
    def offsets(self) -> Int64Array:
        """Start of each row in the packed matrix, and T at the end: `[rows + 1]`."""
        return np.concatenate(([0], np.cumsum(self.counts))).astype(np.int64)

    @cached_property
    def positions(self) -> Int64Array:
        """Position of each packed token (first position + depth): `[T]`."""
        if self.is_decode:
            return np.asarray(self.first_positions, dtype=np.int64)
        first = np.repeat(np.asarray(self.first_positions, dtype=np.int64), self.counts)
        return first + self.depths

    @cached_property
    def depths(self) -> Int64Array:
        """Depth of each packed token below its row's last held token: `[T]`."""
        if self.parents is None:
            start = np.repeat(self.offsets[:-1], self.counts)
            return np.arange(self.tokens, dtype=np.int64) - start
        depths = np.zeros(self.tokens, dtype=np.int64)
        for row in self.rows():
            for index, parent in enumerate(row.parents or ()):
                if parent >= 0:
                    depths[row.offset + index] = depths[row.offset + parent] + 1
        return depths

    @cached_property
    def last_rows(self) -> Int64Array:
        """Packed index of the last token of each row: `[rows]`."""
        return self.offsets[1:] - 1

    def select(self, start: int, stop: int) -> PackedTable:
        """The packed tokens `[start, stop)` as a table of their own (chains only).

        Raises ValueError for trees, which are never split, and for empty ranges.
        """
        if self.parents is not None:
            raise ValueError("a draft tree is never split into chunks")
        if not 0 <= start < stop <= self.tokens:
            raise ValueError(f"no tokens {start}:{stop} in a table of {self.tokens}")
        kept = [
            (row.sequence, row.first_position + low - row.offset, high - low)
            for row in self.rows()
            if (low := max(start, row.offset)) < (high := min(stop, row.offset + row.count))
        ]
        sequences, firsts, counts = zip(*kept, strict=True)
        return PackedTable(sequences, firsts, counts)
