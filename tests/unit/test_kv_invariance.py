"""A sequence's result does not change by a bit with the company it keeps."""

from __future__ import annotations

import pytest
import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.kv import BatchItem, KVPool, KVShape, make_pool

SESSION = SessionId(b"s" * 16)
LENGTHS = (1, 5, 64, 65, 190, 200, 250, 257, 383, 390, 640, 1020, 1100, 1500)
HEADS = [(9, 3, 64), (4, 4, 16), (4, 1, 128)]


def filled_pool(kv_heads: int, size: int, dtype: torch.dtype) -> KVPool:
    """Two blocks, one sequence of each length."""
    shape = KVShape(Span(0, 1), kv_heads, size, dtype, torch.device("cpu"))
    pool = make_pool(shape, 64 * 32 * len(LENGTHS), max_length=2000)
    pool.reserve(SESSION, len(LENGTHS), 1600)
    noise = torch.Generator().manual_seed(1)
    for sequence, length in enumerate(LENGTHS):
        key, value = torch.randn((2, length, kv_heads, size), generator=noise).to(dtype)
        pool.load(SESSION, sequence, 0, key, value)
    return pool


def attend_rows(
    pool: KVPool, rows: list[int], count: int, heads: int, window: int | None
) -> dict[int, torch.Tensor]:
    """Results by sequence of a step of `count` tokens for `rows`, undone afterwards."""
    table = PackedTable(tuple(rows), tuple(LENGTHS[row] for row in rows), (count,) * len(rows))
    plan = pool.begin([BatchItem(SESSION, table)])
    shape = pool.shape
    new = {}
    for row in rows:
        noise = torch.Generator().manual_seed(row)
        size = (count, heads + 2 * shape.kv_heads, shape.head_size)
        new[row] = torch.randn(size, generator=noise).to(shape.dtype)
    packed = torch.cat([new[row] for row in rows])
    query, key, value = packed.split((heads, shape.kv_heads, shape.kv_heads), dim=1)
    out = pool.attend(plan, 0, query, key, value, scaling=0.3, window=window)
    pool.abort(plan)
    return dict(zip(rows, out.split(count), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize(("count", "window"), [(1, None), (1, 100), (3, None), (20, None)])
def test_alone_equals_in_company(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, count: int, window: int | None
) -> None:
    """Whole batch, halves, every other row and reversed order: equal bits."""
    with torch.inference_mode():
        pool = filled_pool(kv_heads, size, dtype)
        everyone = list(range(len(LENGTHS)))
        alone = {}
        for row in everyone:
            alone |= attend_rows(pool, [row], count, heads, window)
        for rows in (everyone[::-1], everyone[::2], everyone[:9]):
            together = attend_rows(pool, rows, count, heads, window)
            differing = [LENGTHS[row] for row in rows if not torch.equal(together[row], alone[row])]
            assert not differing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_number_of_rows_changes_nothing(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    """Forty rows of one length against each alone."""
    with torch.inference_mode():
        shape = KVShape(Span(0, 1), kv_heads, size, dtype, torch.device("cpu"))
        pool = make_pool(shape, 40 * 320, max_length=320)
        pool.reserve(SESSION, 40, 320)
        noise = torch.Generator().manual_seed(1)
        for sequence in range(40):
            key, value = torch.randn((2, 300, kv_heads, size), generator=noise).to(dtype)
            pool.load(SESSION, sequence, 0, key, value)
        packed = torch.randn((40, heads + 2 * kv_heads, size), generator=noise).to(dtype)

        def step(rows: range) -> torch.Tensor:
            count = len(rows)
            table = PackedTable(tuple(rows), (300,) * count, (1,) * count)
            plan = pool.begin([BatchItem(SESSION, table)])
            parts = packed[rows.start : rows.stop].split((heads, kv_heads, kv_heads), dim=1)
            out = pool.attend(plan, 0, *parts, scaling=0.2)
            pool.abort(plan)
            return out

        alone = torch.cat([step(range(row, row + 1)) for row in range(40)])
        for count in (2, 3, 4, 7, 16, 33, 40):
            assert torch.equal(step(range(count)), alone[:count])
