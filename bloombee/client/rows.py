"""Which sequence on the servers holds each row of a batch, and what has to change there.

`generate` reorders, drops, repeats and shortens rows at will; nothing of it is
sent until tokens follow. Then the least work is asked for: a sequence that one
row continues stays where it is, whatever the row's number, and only rows that
share their past with another are forked, into sequences nobody wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloombee.errors import RequestError
from bloombee.protocol.messages import Operations


@dataclass(frozen=True, slots=True)
class Row:
    """A row continues the first `length` tokens of `sequence`."""

    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Resolution:
    """Where each row lies once `operations` are done."""

    rows: tuple[Row, ...]
    operations: Operations


def resolve(rows: Sequence[Row], held: Sequence[int]) -> Resolution:
    """Give every row a sequence of its own, and its past in it.

    `held` are the lengths that the servers hold of each sequence of the session.
    Raises RequestError when there are more rows than sequences.
    """
    if len(rows) > len(held):
        raise RequestError(
            f"{len(rows)} rows need more than the session's {len(held)} sequences: "
            "open it with a larger batch_size"
        )
    wanted = {row.sequence for row in rows}
    free = [sequence for sequence in range(len(held)) if sequence not in wanted]
    owners: dict[int, int] = {}
    for index in sorted(range(len(rows)), key=lambda i: rows[i].sequence != i):
        owners.setdefault(rows[index].sequence, index)
    resolved: list[Row] = []
    forks: list[tuple[int, int]] = []
    truncates: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        target, holds = row.sequence, held[row.sequence]
        if owners[row.sequence] != index:
            target = index if index in free else free[0]
            free.remove(target)
            if row.length:
                forks.append((target, row.sequence))
            else:
                holds = held[target]
        if row.length < holds:
            truncates.append((target, row.length))
        resolved.append(Row(target, row.length))
    return Resolution(tuple(resolved), Operations(forks=tuple(forks), truncates=tuple(truncates)))
