"""Pages of a session between two pools: bit for bit, in order, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import ProtocolError
from bloombee.kv import BatchItem, KVPool, KVShape, make_pool
from bloombee.kv.paged import make_paged
from bloombee.planner.handover import Progress, worth_fetching
from bloombee.protocol.messages import HandedOver, Pages
from bloombee.server.carried import Carried, Terms
from bloombee.server.handover import Handed, Pieces
from bloombee.server.intake import Intake, load
from bloombee.server.pieces import Piece, batches, kv_pieces, row_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SESSION = SessionId(b"s" * 16)
SHAPE = KVShape(Span(2, 6), 2, 8, torch.bfloat16, torch.device("cpu"))
WIDTH = 12
LONGEST = 300
LENGTHS = (257, 0, 40, 1)
TERMS = Terms(
    session=SESSION,
    span=Span(3, 5),
    sequences=4,
    max_length=LONGEST,
    hidden_size=WIDTH,
    wire_dtype="bfloat16",
)


def contiguous(shape: KVShape = SHAPE) -> KVPool:
    return make_pool(shape, 4096, max_length=LONGEST)


def paged() -> KVPool:
    return make_paged(SHAPE, 60, LONGEST, 64)


def filled(pool: KVPool, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> KVPool:
    """A pool whose session holds `lengths` random tokens."""
    chance = torch.Generator().manual_seed(seed)
    shape = pool.shape
    pool.reserve(SESSION, len(lengths), LONGEST)
    live = [(sequence, length) for sequence, length in enumerate(lengths) if length]
    table = PackedTable(
        tuple(sequence for sequence, _ in live),
        (0,) * len(live),
        tuple(length for _, length in live),
    )
    with torch.inference_mode():
        plan = pool.begin([BatchItem(SESSION, table)])
        for block in range(shape.span.start, shape.span.end):
            query, key, value = (
                torch.randn(
                    (table.tokens, shape.kv_heads, shape.head_size), generator=chance
                ).bfloat16()
                for _ in range(3)
            )
            pool.attend(plan, block, query, key, value, scaling=1.0)
        pool.finish(plan)
    return pool


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def carried(lengths: Sequence[int] = LENGTHS) -> Carried:
    return Carried(
        lengths=tuple(lengths),
        newest_steps=(9, 3, 9, 8),
        released=(False, True, False, False),
        included=(8,),
        journal=tuple(rows(length, index) for index, length in enumerate(lengths)),
        outputs=((7, rows(0, 0)), (8, rows(30, 70)), (9, rows(2, 71))),
    )


def pages_of(pool: KVPool, state: Carried, most_bytes: int = 1000) -> list[Handed]:
    """Everything that travels before the book, in small pieces."""
    pieces = Pieces(TERMS, state, pool.shape, most_bytes)
    found: list[Handed] = []
    for batch in batches(pieces.kv, most_bytes):
        found += pieces.export(batch, pool)
    return [*found, *pieces.row_pages()]


def book_of(state: Carried) -> HandedOver:
    return HandedOver(
        SESSION,
        state.lengths,
        state.newest_steps,
        state.released,
        state.included,
        tuple(step for step, _ in state.outputs),
    )


def page_of(handed: Handed) -> Pages:
    """The page; these sessions have no tokens that a stage chose."""
    assert isinstance(handed.page, Pages)
    return handed.page


def taken(pool: KVPool, pages: Sequence[Handed], told: HandedOver) -> Carried:
    """What an intake makes of these pages; the pool holds the KV."""
    intake = Intake(TERMS, pool.shape)
    for handed in pages:
        intake.take(page_of(handed), memoryview(bytes(handed.body)))
        loads, intake.loads = intake.loads, []
        load(pool, TERMS, loads)
        pool.check_integrity()
    return intake.finish(told)


@pytest.mark.parametrize("old", [contiguous, paged])
@pytest.mark.parametrize("new", [contiguous, paged])
def test_a_session_moves_bit_for_bit(old: Callable[[], KVPool], new: Callable[[], KVPool]) -> None:
    source, target, state = filled(old()), new(), carried()
    target.reserve(SESSION, 4, LONGEST)
    pages = pages_of(source, state)
    assert len(pages) > 50 and max(len(bytes(handed.body)) for handed in pages) <= 1000
    got = taken(target, pages, book_of(state))
    assert target.lengths(SESSION) == LENGTHS
    for sequence, length in enumerate(LENGTHS):
        for block in (3, 4) if length else ():
            mine, theirs = (
                pool.export(SESSION, sequence, block, 0, length) for pool in (target, source)
            )
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert replace(got, journal=None, outputs=()) == replace(state, journal=None, outputs=())
    assert got.journal is not None and state.journal is not None
    assert all(torch.equal(a, b) for a, b in zip(got.journal, state.journal, strict=True))
    assert [step for step, _ in got.outputs] == [7, 8, 9]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got.outputs, state.outputs, strict=True))


def test_without_a_journal_and_without_tokens() -> None:
    state = replace(carried(), journal=None, outputs=())
    source, target = filled(contiguous()), contiguous()
    target.reserve(SESSION, 4, LONGEST)
    assert taken(target, pages_of(source, state), book_of(state)).journal is None
    empty = replace(state, lengths=(0, 0, 0, 0), newest_steps=(0,) * 4)
    fresh = contiguous()
    fresh.reserve(SESSION, 4, LONGEST)
    assert taken(fresh, [], book_of(empty)).lengths == (0, 0, 0, 0)


def change(index: int, **changes: object) -> Callable[[list[Handed]], list[Handed]]:
    """Pages with one that says something else."""

    def apply(pages: list[Handed]) -> list[Handed]:
        handed = pages[index]
        page = msgspec.structs.replace(handed.page, **changes)
        return [*pages[:index], Handed(page, handed.body), *pages[index:][1:]]

    return apply


def cut(index: int, size: int) -> Callable[[list[Handed]], list[Handed]]:
    """Pages with one whose bytes end early, or go on."""

    def apply(pages: list[Handed]) -> list[Handed]:
        handed = pages[index]
        body = bytes(handed.body)[:size] if size >= 0 else bytes(handed.body) + bytes(-size)
        return [*pages[:index], Handed(handed.page, body), *pages[index:][1:]]

    return apply


LIES: dict[str, Callable[[list[Handed]], list[Handed]]] = {
    "one is missing": lambda pages: [*pages[:7], *pages[8:]],
    "the first is missing": lambda pages: pages[1:],
    "the last is missing": lambda pages: pages[:-1],
    "a block is missing": lambda pages: [
        p for p in pages if (page_of(p).sequence, page_of(p).block) != (2, 4)
    ],
    "a sequence is missing": lambda pages: [p for p in pages if page_of(p).sequence != 3],
    "two are swapped": lambda pages: [*pages[:2], pages[3], pages[2], *pages[4:]],
    "one comes twice": lambda pages: [*pages[:3], pages[2], *pages[3:]],
    "nothing but the book": lambda pages: [],
    "journal before KV": lambda pages: sorted(pages, key=lambda p: page_of(p).kind == "kv"),
    "short bytes": cut(4, 10),
    "no bytes": cut(4, 0),
    "more bytes": cut(4, -2),
    "another block": change(0, block=2),
    "a block outside": change(0, block=7),
    "a sequence outside": change(0, sequence=4),
    "another session": change(0, session=b"x" * 16),
    "another dtype": change(0, dtype="float16"),
    "another dtype of rows": change(-1, dtype="float32"),
    "longer than the session": change(0, whole=LONGEST + 1),
    "other lengths within a sequence": change(1, whole=200),
    "an empty page": change(0, count=0),
    "a page past its end": change(0, count=258),
    "another total": change(5, total_bytes=7),
    "a total that no session has": lambda pages: [
        Handed(msgspec.structs.replace(p.page, total_bytes=1 << 40), p.body) for p in pages
    ],
    "a smaller total": lambda pages: [
        Handed(msgspec.structs.replace(p.page, total_bytes=page_of(p).total_bytes - 1), p.body)
        for p in pages
    ],
    "a larger total": lambda pages: [
        Handed(msgspec.structs.replace(p.page, total_bytes=page_of(p).total_bytes + 1), p.body)
        for p in pages
    ],
    "an output nobody asked for": change(-1, sequence=9),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_what_does_not_fit_is_refused(lie: Callable[[list[Handed]], list[Handed]]) -> None:
    source, target, state = filled(contiguous()), contiguous(), carried()
    target.reserve(SESSION, 4, LONGEST)
    with pytest.raises(ProtocolError):
        taken(target, lie(pages_of(source, state)), book_of(state))
    for sequence in range(4):
        target.truncate(SESSION, sequence, 0)
    target.check_integrity()
    assert taken(target, pages_of(source, state), book_of(state)).lengths == LENGTHS


BOOKS: dict[str, dict[str, object]] = {
    "a longer sequence": {"lengths": (258, 0, 40, 1)},
    "a shorter sequence": {"lengths": (256, 0, 40, 1)},
    "fewer sequences": {"lengths": (257, 0, 40)},
    "fewer steps": {"newest_steps": (1,)},
    "fewer releases": {"released": ()},
    "a released sequence with tokens": {"released": (True, False, False, False)},
    "fewer outputs": {"outputs": (7, 8)},
}


@pytest.mark.parametrize("changes", BOOKS.values(), ids=BOOKS.keys())
def test_a_book_that_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    source, target, state = filled(contiguous()), contiguous(), carried()
    target.reserve(SESSION, 4, LONGEST)
    told = msgspec.structs.replace(book_of(state), **changes)
    with pytest.raises(ProtocolError):
        taken(target, pages_of(source, state), told)


def test_pieces_are_bounded_and_batched() -> None:
    pieces = [*kv_pieces((5, 0, 2), Span(1, 3), 10, 25), *row_pieces("journal", (3,), 100, 25)]
    assert pieces[:3] == [
        Piece("kv", 0, 1, 0, 2, 5, 20),
        Piece("kv", 0, 1, 2, 2, 5, 20),
        Piece("kv", 0, 1, 4, 1, 5, 10),
    ]
    assert [(p.sequence, p.block, p.first, p.count) for p in pieces[6:8]] == [
        (2, 1, 0, 2),
        (2, 2, 0, 2),
    ]
    assert [(p.kind, p.first, p.count_bytes) for p in pieces[8:]] == [
        ("journal", 0, 100),
        ("journal", 1, 100),
        ("journal", 2, 100),
    ]
    assert [[p.count_bytes for p in batch] for batch in batches(pieces, 40)][:2] == [
        [20, 20],
        [10, 20],
    ]
    assert sum(len(batch) for batch in batches(pieces, 40)) == len(pieces)


def test_pages_where_they_are_quicker_than_replay() -> None:
    def after(elapsed_s: float, sample_mb: float, sample_s: float) -> Progress:
        sample = int(sample_mb * 1e6)
        return Progress(
            total_bytes=100_000_000,
            received_bytes=1_000_000 + sample,
            elapsed_s=elapsed_s,
            sample_bytes=sample,
            sample_s=sample_s,
        )

    assert worth_fetching(after(0.5, 0.0, 0.0), 1.0)  # nothing known yet
    assert not worth_fetching(after(1.5, 0.0, 0.0), 1.0)
    assert worth_fetching(after(0.6, 1.0, 0.1), 11.0)  # 98 MB at 10 MB/s
    assert after(0.6, 1.0, 0.1).projected_s == pytest.approx(10.4)
    assert not worth_fetching(after(0.6, 1.0, 0.1), 10.0)
