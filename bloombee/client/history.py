"""What a session has sent, per sequence: enough to rebuild its KV somewhere else.

An entry is a token id, or the row `[D]` itself where the caller gave embeddings
instead of ids. Entries cover exactly what the servers hold after the last step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float

from bloombee.core import PackedTable
from bloombee.protocol.messages import Operations

Entry = int | torch.Tensor


class History:
    """The entries of sequences 0..n-1 of one session."""

    def __init__(self, sequences: int) -> None:
        self.released: set[int] = set()
        """Sequences that were freed for good."""
        self._entries: list[list[Entry]] = [[] for _ in range(sequences)]

    def __len__(self) -> int:
        return len(self._entries)

    def length(self, sequence: int) -> int:
        """Tokens that the servers hold of `sequence`."""
        return len(self._entries[sequence])

    def entries(self, sequence: int) -> Sequence[Entry]:
        """What was sent of `sequence`, in order; not to be changed."""
        return self._entries[sequence]

    def apply(self, operations: Operations) -> None:
        """Fork, truncate and release, as the servers do it."""
        copies = [(target, list(self._entries[source])) for target, source in operations.forks]
        for target, entries in copies:
            self._entries[target] = entries
        for sequence, length in operations.truncates:
            del self._entries[sequence][length:]
        for sequence in operations.releases:
            self._entries[sequence] = []
            self.released.add(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """Forget what was sent of `sequence` beyond `length`."""
        del self._entries[sequence][length:]

    def restore(self, sequence: int, entries: Sequence[Entry]) -> None:
        """Let `sequence` be these entries."""
        self._entries[sequence] = list(entries)

    @property
    def lengths(self) -> list[int]:
        """Tokens sent of every sequence."""
        return [len(entries) for entries in self._entries]

    def append(self, table: PackedTable, entries: Sequence[Entry]) -> None:
        """Add the packed tokens of one step."""
        if table.is_decode:
            for sequence, entry in zip(table.sequences, entries, strict=True):
                self._entries[sequence].append(entry)
            return
        for row in table.rows():
            self._entries[row.sequence].extend(entries[row.offset : row.offset + row.count])


def entries_of(rows: Float[torch.Tensor, "T D"]) -> list[Entry]:
    """Entries for tokens that have no ids."""
    return list(rows.detach().clone().unbind(0))
