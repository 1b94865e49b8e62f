"""Attention over an arena: decode rows as strided batches, long rows in tiles.

Measured (benchmarks/attention.py): keys lie as they come, `[K, N, E]`, and the
scores of a few queries are keys x queries. Streamed from memory that is within a
tenth of keys kept transposed, and faster in bfloat16 from 1,024 tokens on, with no
pages to loop over; from `WIDE_QUERIES` on, queries x keys is faster. Tiles of
queries against all earlier keys beat fused attention for prefill in float32 and
bfloat16, as the corners above the diagonal are never computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int

from bloombee.kv.arena import Arena, SlotRange

WIDE_QUERIES = 24


@dataclass(frozen=True, slots=True)
class Merged:
    """Rows of `count` new tokens each that attend as one batch over `where`.

    `take`: the packed tokens, in slot order, `[R * count]`, or a slice of them.
    `put`/`keep`: results `keep` go to packed tokens `put` (slots between rows are
    computed too and dropped); None when the batch is exactly `take`.
    `hidden`: `[R, 1, count, width - hidden_from]`, True where a slot is not seen.
    """

    where: SlotRange
    count: int
    take: slice | Int[torch.Tensor, "N"]
    put: Int[torch.Tensor, "T"] | None
    keep: Int[torch.Tensor, "T"] | None
    hidden: Bool[torch.Tensor, "R 1 C W"] | None
    hidden_from: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Packed tokens `[start, stop)` of one row against `where`; `hidden` as in Merged."""

    where: SlotRange
    start: int
    stop: int
    hidden: Bool[torch.Tensor, "C W"]
    hidden_from: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How one step attends. `whole`: one merged batch in packed order is all of it."""

    merged: tuple[Merged, ...]
    tiles: tuple[Tile, ...]
    whole: bool


def attend_layout(
    arena: Arena, layer: int, layout: Layout, query: Float[torch.Tensor, "T H E"], scaling: float
) -> Float[torch.Tensor, "T H E"]:
    """Attention of the packed queries over what the arena holds on one block."""
    if layout.whole:
        return attend_merged(arena, layer, layout.merged[0], query, scaling)
    out = torch.empty(query.shape, dtype=query.dtype)
    for group in layout.merged:
        result = attend_merged(arena, layer, group, query[group.take], scaling)
        if group.put is None:
            out[group.take] = result
        else:
            out[group.put] = result[group.keep]
    for tile in layout.tiles:
        chunk = slice(tile.start, tile.stop)
        out[chunk] = attend_tile(arena, layer, tile, query[chunk], scaling)
    return out


def attend_merged(
    arena: Arena,
    layer: int,
    group: Merged,
    query: Float[torch.Tensor, "N H E"],
    scaling: float,
) -> Float[torch.Tensor, "N H E"]:
    """One strided batch: N = rows x count queries in slot order."""
    keys, values = arena.read(layer, group.where)
    rows, kv_heads, count = group.where.rows, arena.shape.kv_heads, group.count
    heads, size = query.shape[1:]
    if count == 1:
        queries = query.reshape(rows * kv_heads, heads // kv_heads, size)
    else:
        queries = (
            query.view(rows, count, kv_heads, -1, size)
            .permute(0, 2, 3, 1, 4)
            .reshape(rows * kv_heads, -1, size)
        )
    scores = scaled_scores(keys, queries, scaling, arena.nothing)  # [R*K, G*C, W]
    if group.hidden is not None:
        seen = scores.view(rows, heads, count, -1)
        seen[..., group.hidden_from :].masked_fill_(group.hidden, -torch.inf)
    result = torch.bmm(torch.softmax(scores, -1), values)  # [R*K, G*C, E]
    if count == 1:
        return result.view(rows, heads, size)
    return result.view(rows, heads, count, size).transpose(1, 2).reshape(-1, heads, size)


def attend_tile(
    arena: Arena, layer: int, tile: Tile, query: Float[torch.Tensor, "C H E"], scaling: float
) -> Float[torch.Tensor, "C H E"]:
    """A tile of one row's queries against all keys it may see."""
    keys, values = arena.read(layer, tile.where)
    kv_heads = arena.shape.kv_heads
    count, heads, size = query.shape
    queries = query.transpose(0, 1).reshape(kv_heads, -1, size)  # [K, G*C, E]
    scores = scaled_scores(keys, queries, scaling, arena.nothing)
    seen = scores.view(heads, count, -1)
    seen[..., tile.hidden_from :].masked_fill_(tile.hidden, -torch.inf)
    result = torch.bmm(torch.softmax(scores, -1), values)
    return result.view(heads, count, size).transpose(0, 1)


def scaled_scores(
    keys: Float[torch.Tensor, "B W E"],
    queries: Float[torch.Tensor, "B Q E"],
    scaling: float,
    nothing: Float[torch.Tensor, "1 1 1"],
) -> Float[torch.Tensor, "B Q W"]:
    """Scaled products, contiguous; beta=0 never reads `nothing`, which only lends its dtype."""
    if queries.shape[1] < WIDE_QUERIES:
        flipped = torch.baddbmm(nothing, keys, queries.transpose(1, 2), beta=0, alpha=scaling)
        return flipped.transpose(1, 2).contiguous()
    return torch.baddbmm(nothing, queries, keys.transpose(1, 2), beta=0, alpha=scaling)
