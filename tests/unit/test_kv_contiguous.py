"""The CPU layout's own promises: memory follows use, neighbours merge, forks copy little."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import KVFull
from bloombee.kv import BatchItem, KVShape, make_pool
from bloombee.kv.contiguous import ContiguousPool, make_contiguous
from bloombee.kv.grouping import Piece, group_pieces
from bloombee.kv.slots import Slots

if TYPE_CHECKING:
    from bloombee.kv.contiguous_attention import Layout

MIB = 1 << 20


def pool_of(total: int, longest: int, dtype: torch.dtype = torch.float32) -> ContiguousPool:
    shape = KVShape(Span(0, 4), 3, 64, dtype, torch.device("cpu"))
    return make_contiguous(shape, -(-total // 64), longest, 64)


def session_id(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fill(pool: ContiguousPool, session: SessionId, sequence: int, tokens: int) -> None:
    new = torch.ones((tokens, 3, 64))
    for block in range(4):
        pool.load(session, sequence, block, new, new)


def test_memory_follows_use() -> None:
    """6 KiB a token: reserving is free, tokens cost what they take, freeing gives it back."""
    gc.collect()
    start = resident_bytes()
    pool = pool_of(total=200_064, longest=100_000)
    pool.reserve(session_id(1), 2, 100_000)
    fill(pool, session_id(1), 0, 64)  # allocators settle
    assert resident_bytes() - start < 16 * MIB
    base = resident_bytes()
    fill(pool, session_id(1), 1, 4096)
    grown = resident_bytes() - base
    expected = 4096 * pool.shape.bytes_per_token
    assert 0.95 * expected < grown < expected + 20 * MIB
    pool.free(session_id(1))
    assert resident_bytes() - base < 16 * MIB


def test_reading_past_the_end_commits_nothing() -> None:
    """A short row beside a long one reads a long stretch of memory nobody wrote."""
    pool = pool_of(total=200_064, longest=100_000)
    pool.reserve(session_id(1), 2, 50_000)
    fill(pool, session_id(1), 1, 2000)
    fill(pool, session_id(1), 0, 1000)
    base = resident_bytes()
    decode(pool, {session_id(1): (1000, 2000)})
    assert pool._arena.slot(0)[..., :50_000, :].amax() == 1
    assert resident_bytes() - base < 32 * MIB


def decode(pool: ContiguousPool, lengths: dict[SessionId, tuple[int, ...]]) -> Layout:
    """The layout of a decode step of all these sequences."""
    batch = [
        BatchItem(session, PackedTable(tuple(range(len(held))), held, (1,) * len(held)))
        for session, held in lengths.items()
    ]
    tokens = sum(item.table.tokens for item in batch)
    plan = pool.begin(batch)
    new = torch.zeros((tokens, 3, 64), dtype=pool.shape.dtype)
    pool.attend(plan, 0, torch.zeros((tokens, 9, 64), dtype=new.dtype), new, new, scaling=1.0)
    pool.abort(plan)
    (layout,) = plan.layouts.values()
    return layout


def test_sixteen_clients_attend_as_one_batch() -> None:
    pool = pool_of(total=20_000, longest=1000)
    lengths = {}
    for number in range(16):
        pool.reserve(session_id(number), 1, 600)
        fill(pool, session_id(number), 0, 100 + number)
        lengths[session_id(number)] = (100 + number,)
    layout = decode(pool, lengths)
    assert layout.whole
    assert len(layout.merged) == 1
    del lengths[session_id(5)]
    holed = decode(pool, lengths)
    assert len(holed.merged) == 1
    assert not holed.whole


def test_a_fork_copies_only_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(total=20_000, longest=1000)
    session = session_id(1)
    pool.reserve(session, 3, 1000)
    fill(pool, session, 0, 500)
    copied: list[range] = []
    plain_copy = pool._copy

    def spy(source: int, destination: int, tokens: range) -> None:
        copied.append(tokens)
        plain_copy(source, destination, tokens)

    monkeypatch.setattr(pool, "_copy", spy)
    pool.fork(session, [(1, 0), (2, 0)])
    assert copied == [range(500), range(500)]
    copied.clear()
    for turn in range(3):
        table = PackedTable((0, 1, 2), (500 + turn,) * 3, (1, 1, 1))
        plan = pool.begin([BatchItem(session, table)])
        for block in range(4):
            new = torch.randn((3, 3, 64))
            pool.attend(plan, block, torch.randn((3, 9, 64)), new, new, scaling=1.0)
        pool.finish(plan)
    pool.fork(session, [(0, 1), (1, 2), (2, 0)])
    assert copied == []
    pool.fork(session, [(0, 1), (2, 1)])
    assert copied == [range(500, 503), range(500, 503)]
    pool.check_integrity()


def test_slots_bound_the_number_of_sequences() -> None:
    pool = pool_of(total=640, longest=64)
    pool._slots.take(3)
    with pytest.raises(KVFull, match="7 of 10 slots are free"):
        pool.reserve(session_id(1), 8, 10)
    assert pool.free_tokens == 640


def test_slots_prefer_neighbours() -> None:
    slots = Slots(10)
    assert slots.take(4) == [0, 1, 2, 3]
    assert slots.take(2) == [4, 5]
    slots.give([1, 2])
    assert slots.take(3) == [6, 7, 8]
    assert slots.take(2) == [1, 2]
    assert slots.take(2) is None
    slots.give([0, 3, 5])
    assert slots.take(3) == [0, 3, 5]


def grouped(*pieces: Piece, waste: int = 100, allowed: bool = True) -> list[list[int]]:
    groups = group_pieces(pieces, waste, lambda own, wide: allowed or own == wide)
    return [[piece.index for piece in group] for group in groups]


def test_rows_merge_while_it_pays() -> None:
    near = [Piece(0, 3, 0, 64), Piece(1, 1, 0, 64), Piece(2, 2, 0, 64)]
    assert grouped(*near) == [[1, 2, 0]]
    assert grouped(Piece(0, 0, 0, 64), Piece(1, 2, 0, 64)) == [[0, 1]]
    assert grouped(Piece(0, 0, 0, 64), Piece(1, 3, 0, 64)) == [[0], [1]]
    assert grouped(Piece(0, 0, 0, 64), Piece(1, 1, 64, 64)) == [[0], [1]]
    assert grouped(Piece(0, 0, 0, 64), Piece(1, 1, 0, 128)) == [[0, 1]]
    assert grouped(Piece(0, 0, 0, 64), Piece(1, 1, 0, 192)) == [[0], [1]]
    assert grouped(Piece(0, 0, 0, 64), Piece(1, 1, 0, 128), allowed=False) == [[0], [1]]


def test_pools_are_written_in_and_out_of_inference_mode() -> None:
    with torch.inference_mode():
        shape = KVShape(Span(0, 1), 3, 64, torch.float32, torch.device("cpu"))
        pool = make_pool(shape, 100, max_length=50)
    pool.reserve(session_id(1), 1, 50)
    pool.load(session_id(1), 0, 0, torch.ones((5, 3, 64)), torch.ones((5, 3, 64)))
    with torch.inference_mode():
        pool.truncate(session_id(1), 0, 2)
    pool.check_integrity()


def test_compacting_one_fork_leaves_its_sibling_distinct() -> None:
    """Tokens moved by `keep` are no longer those the fork shared."""
    pool = pool_of(total=2000, longest=200)
    session = session_id(1)
    pool.reserve(session, 2, 200)
    noise = torch.randn((4, 2, 30, 3, 64))
    for block in range(4):
        pool.load(session, 0, block, *noise[block])
    pool.fork(session, [(1, 0)])
    pool.keep(session, 1, 20, [0, 4, 9])
    pool.check_integrity()
    pool.fork(session, [(0, 1)])
    key, value = pool.export(session, 0, 2, 0, 23)
    kept = [*range(21), 24, 29]
    assert torch.equal(key, noise[2][0][kept])
    assert torch.equal(value, noise[2][1][kept])
    pool.check_integrity()
