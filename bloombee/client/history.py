"""What a session has sent, per sequence: enough to rebuild its KV somewhere else.

An entry is a token id, or the row `[D]` itself where the caller gave embeddings
instead of ids. Entries cover exactly what the servers hold after the last step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from msgspec.structs import replace

from bloombee.core import PackedTable
from bloombee.protocol.messages import Operations

Entry = int | torch.Tensor
Kept = TypeVar("Kept")


class History:
    """The entries of sequences 0..n-1 of one session.

    With `keep_starts` it knows where the steps began that they came with.
    """

    def __init__(self, sequences: int, *, keep_starts: bool = False) -> None:
        self._starts: list[list[int]] | None = (
            [[] for _ in range(sequences)] if keep_starts else None
        )
        self.released: set[int] = set()
        """Sequences that were freed for good."""
        self.ahead: set[int] = set()
        """Sequences of which stages may hold more than counts, since they ran ahead."""
        self._entries: list[list[Entry]] = [[] for _ in range(sequences)]

    def __len__(self) -> int:
        return len(self._entries)

    def length(self, sequence: int) -> int:
        """Tokens that the servers hold of `sequence`."""
        return len(self._entries[sequence])

    def entries(self, sequence: int) -> Sequence[Entry]:
        """What was sent of `sequence`, in order; not to be changed."""
        return self._entries[sequence]

    def starts(self, sequence: int) -> Sequence[int]:
        """Where the steps of `sequence` began; as if all came with one when that isn't kept."""
        return (0,) if self._starts is None else self._starts[sequence]

    def apply(self, operations: Operations) -> Operations:
        """Fork, truncate and release, as the servers do it.

        Returns what they are to do, which is more where they are `ahead`: they forget what
        counts no longer.
        """
        _fork(self._entries, operations)
        if self._starts is not None:
            _fork(self._starts, operations)
        for sequence, length in operations.truncates:
            self.cut(sequence, length)
        for sequence in operations.releases:
            self.cut(sequence, 0)
            self.released.add(sequence)
        return self._levelled(operations) if self.ahead else operations

    def _levelled(self, operations: Operations) -> Operations:
        ahead, self.ahead = self.ahead, set()
        longer = {target for target, source in operations.forks if source in ahead}
        done = {target for target, _ in operations.forks} - longer
        done |= {sequence for sequence, _ in operations.truncates} | self.released
        cuts = [(s, self.length(s)) for s in sorted((ahead | longer) - done)]
        return replace(operations, truncates=(*operations.truncates, *cuts))

    def cut(self, sequence: int, length: int) -> None:
        """Forget what was sent of `sequence` beyond `length`."""
        del self._entries[sequence][length:]
        if self._starts is not None:
            del self._starts[sequence][bisect_left(self._starts[sequence], length) :]

    def restore(self, sequence: int, entries: Sequence[Entry]) -> None:
        """Let `sequence` be these entries, as if they came with one step."""
        self._entries[sequence] = list(entries)
        if self._starts is not None:
            self._starts[sequence] = [0] if entries else []

    @property
    def lengths(self) -> list[int]:
        """Tokens sent of every sequence."""
        return [len(entries) for entries in self._entries]

    def append(self, table: PackedTable, entries: Sequence[Entry]) -> None:
        """Add the packed tokens of one step."""
        if self._starts is not None:
            for sequence, first in zip(table.sequences, table.first_positions, strict=True):
                self._starts[sequence].append(first)
        if table.is_decode:
            for sequence, entry in zip(table.sequences, entries, strict=True):
                self._entries[sequence].append(entry)
            return
        for row in table.rows():
            self._entries[row.sequence].extend(entries[row.offset : row.offset + row.count])


def _fork(kept: list[list[Kept]], operations: Operations) -> None:
    copies = [(target, list(kept[source])) for target, source in operations.forks]
    for target, copied in copies:
        kept[target] = copied


def entries_of(rows: Float[torch.Tensor, "T D"]) -> list[Entry]:
    """Entries for tokens that have no ids."""
    return list(rows.detach().clone().unbind(0))


def ids_of(entries: Iterable[Entry]) -> list[int]:
    """The entries, all of which are ids."""
    return [entry for entry in entries if isinstance(entry, int)]
