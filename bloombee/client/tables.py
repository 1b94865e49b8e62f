"""The packed table of a step over rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bloombee.client.rows import Row
from bloombee.core import PackedTable
from bloombee.errors import RequestError


def table_of(rows: Sequence[Row], counts: Sequence[int]) -> PackedTable:
    """Of rows with new tokens, `counts` of each. Raises RequestError when there are none."""
    live = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
    if not live:
        raise RequestError("the step has no unmasked token: unmask at least one position")
    return PackedTable(
        tuple(row.sequence for row, _ in live),
        tuple(row.length for row, _ in live),
        tuple(count for _, count in live),
    )


def ascending(table: PackedTable) -> list[int] | None:
    """The order that puts decode rows in order of their sequences, where KV lies side by side."""
    if not table.is_decode or all(a < b for a, b in pairwise(table.sequences)):
        return None
    return sorted(range(len(table.sequences)), key=table.sequences.__getitem__)


def reordered(table: PackedTable, order: Sequence[int]) -> PackedTable:
    """The same rows in another order."""
    return PackedTable(
        tuple(table.sequences[i] for i in order),
        tuple(table.first_positions[i] for i in order),
        tuple(table.counts[i] for i in order),
    )
