"""From the rows of a step to the batches and tiles that attend (CPU layout).

Short rows (decode, small drafts) merge into strided batches; long rows go one by
one in tiles of queries. Which of the two, and every width, depends on the row
alone, so its result does not depend on the company it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bloombee.kv.arena import LANE_TOKENS, ArenaShape, SlotRange, lane_aligned
from bloombee.kv.contiguous_attention import Layout, Merged, Tile
from bloombee.kv.grouping import Piece, group_pieces
from bloombee.kv.ledger import StepRow
from bloombee.kv.rounding import same_rounding
from bloombee.kv.visibility import Mask, visible

MERGED_TOKENS = 8
"""Rows with more new tokens than this attend alone."""

TILE_QUERIES = 128
"""Query rows per tile and KV head, about: more fall out of cache, fewer cost calls."""

CALLS_COST_BYTES = 384 << 10
"""What one more set of calls costs (30 us), in bytes attended meanwhile."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads of the model and the sliding window of the layer: what masks depend on."""

    query_heads: int
    window: int | None


Row = StepRow[int]


def build_layout(rows: Sequence[Row], shape: ArenaShape, heads: Heads) -> Layout:
    """Work out batches, tiles and masks for one kind of layer of one step."""
    short: dict[int, list[Piece]] = {}
    tiles: list[Tile] = []
    for index, row in enumerate(rows):
        if row.count > MERGED_TOKENS:
            tiles += _tiles(row, shape, heads)
        else:
            short.setdefault(row.count, []).append(_piece(index, row, heads.window))
    merged = [
        _merged(group, rows, shape, heads.window)
        for count, pieces in short.items()
        for group in _groups(pieces, count, shape, heads)
    ]
    whole = len(merged) == 1 and not tiles and merged[0].put is None
    return Layout(tuple(merged), tuple(tiles), whole)


def _piece(index: int, row: Row, window: int | None) -> Piece:
    low = _low(row.first, window)
    return Piece(index, row.held.place, low, lane_aligned(row.end - low))


def _low(position: int, window: int | None) -> int:
    """First token read for a query at `position`, on a lane."""
    if window is None:
        return 0
    return max(0, position - window + 1) // LANE_TOKENS * LANE_TOKENS


def _groups(
    pieces: Iterable[Piece], count: int, shape: ArenaShape, heads: Heads
) -> list[list[Piece]]:
    queries = heads.query_heads // shape.kv_heads * count
    token_bytes = 2 * shape.kv_heads * shape.head_size * shape.dtype.itemsize

    def same(narrow: int, wide: int) -> bool:
        return same_rounding(shape.dtype, queries, shape.head_size, narrow, wide)

    return group_pieces(pieces, CALLS_COST_BYTES // token_bytes, same)


def _merged(
    group: list[Piece], rows: Sequence[Row], shape: ArenaShape, window: int | None
) -> Merged:
    members = [rows[piece.index] for piece in group]
    count, first_slot, low = members[0].count, group[0].slot, group[0].low
    width = max(piece.width for piece in group)
    lines = [piece.slot - first_slot for piece in group]
    where = SlotRange(shape, first_slot, lines[-1] + 1, low, width)
    hidden, hidden_from = _hidden(members, lines, _Frame(lines[-1] + 1, low, width), window)
    start = members[0].offset
    if where.rows == len(group) and all(
        row.offset == start + line * count for row, line in zip(members, lines, strict=True)
    ):
        packed = slice(start, start + where.rows * count)
        return Merged(where, count, packed, None, None, hidden, hidden_from)
    steps = np.arange(count)
    put = np.concatenate([row.offset + steps for row in members])
    keep = np.concatenate([line * count + steps for line in lines])
    take = np.zeros(where.rows * count, dtype=np.int64)
    take[keep] = put
    taken, placed, kept = (torch.from_numpy(array) for array in (take, put, keep))
    return Merged(where, count, taken, placed, kept, hidden, hidden_from)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Slots and token columns that a merged batch reads."""

    rows: int
    low: int
    width: int


def _hidden(
    members: Sequence[Row], lines: Sequence[int], where: _Frame, window: int | None
) -> tuple[torch.Tensor | None, int]:
    """Mask of a merged batch, from the first column in which it hides anything."""
    count = members[0].count
    if count == 1:
        ends = np.full(where.rows, where.low + where.width)
        ends[list(lines)] = [row.end for row in members]
        columns = np.arange(where.low, where.low + where.width)
        hidden = columns >= ends[:, None]
        if window is not None:
            hidden |= columns < ends[:, None] - window
        hidden = hidden[:, None, :]
    else:
        hidden = np.zeros((where.rows, count, where.width), dtype=np.bool_)
        for row, line in zip(members, lines, strict=True):
            seen = visible(row.first, count, row.parents, window)[:, where.low :]
            hidden[line, :, : seen.shape[1]] = ~seen
            hidden[line, :, seen.shape[1] :] = True
    touched = np.flatnonzero(hidden.any(axis=(0, 1)))
    if not len(touched):
        return None, where.width
    hidden_from = int(touched[0])
    return torch.from_numpy(hidden[:, None, :, hidden_from:].copy()), hidden_from


def _tiles(row: Row, shape: ArenaShape, heads: Heads) -> Iterator[Tile]:
    """Tiles that end at multiples of their size, so that chunks cut there change nothing."""
    group = heads.query_heads // shape.kv_heads
    size = max(16, TILE_QUERIES // (2 if group > 1 else 1))
    start = row.first
    tree = None
    if row.parents is not None:
        tree = visible(row.first, row.count, row.parents, heads.window)
    while start < row.end:
        stop = min(row.end, (start // size + 1) * size)
        yield _tile(row, range(start, stop), tree, shape, heads.window)
        start = stop


def _tile(
    row: Row, tokens: range, tree: Mask | None, shape: ArenaShape, window: int | None
) -> Tile:
    start, stop = tokens.start, tokens.stop
    offset = row.offset - row.first
    if tree is not None:
        low, end = _low(row.first, window), row.end
        seen = tree[start - row.first : stop - row.first, low:]
        hidden_from = 0 if window is not None else row.first
    else:
        low, end = _low(start, window), stop
        seen = visible(start, stop - start, None, window)[:, low:]
        hidden_from = 0 if window is not None else start
    where = SlotRange(shape, row.held.place, 1, low, end - low)
    hidden = torch.from_numpy(~seen[:, hidden_from:])
    return Tile(where, start + offset, stop + offset, hidden, hidden_from)
