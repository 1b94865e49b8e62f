"""What both layouts promise: accounting, refusals, forks, trees, chunks, and finite numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import KVFull, RequestError, SettingsError
from bloombee.kv import BatchItem, KVPool, KVShape, make_pool
from bloombee.kv.paged import make_paged
from bloombee.kv.plain import PlainPool

ONE = SessionId(b"1" * 16)
TWO = SessionId(b"2" * 16)
HEADS, KV_HEADS, SIZE = 4, 2, 16
SHAPE = KVShape(Span(2, 4), KV_HEADS, SIZE, torch.float32, torch.device("cpu"))

MakePool = Callable[[int, int, int], KVPool]


def contiguous(pages: int, longest: int, page: int) -> KVPool:
    return make_pool(SHAPE, pages * page, max_length=longest, page_tokens=page)


def paged(pages: int, longest: int, page: int) -> KVPool:
    return make_paged(SHAPE, pages, longest, page)


both = pytest.mark.parametrize("make", [contiguous, paged])


def chain(*rows: tuple[int, int, int]) -> PackedTable:
    """A table of (sequence, first position, count)."""
    sequences, firsts, counts = zip(*rows, strict=True)
    return PackedTable(sequences, firsts, counts)


def numbers(tokens: int, seed: int) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    packed = torch.randn((tokens, HEADS + 2 * KV_HEADS, SIZE), generator=noise)
    return list(packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1))


def step(
    pool: KVPool, table: PackedTable, seed: int, session: SessionId = ONE, window: int | None = None
) -> torch.Tensor:
    """One whole step; the result of its last block."""
    plan = pool.begin([BatchItem(session, table)])
    out = torch.empty(0)
    for block in range(2, 4):
        parts = numbers(table.tokens, seed + block)
        out = pool.attend(plan, block, *parts, scaling=0.3, window=window)
    pool.finish(plan)
    return out


@both
def test_sequences_released_from_the_start_take_nothing(make: MakePool) -> None:
    pool = make(4, 100, 16)
    with pytest.raises(RequestError, match="of only 3 sequences"):
        pool.reserve(ONE, 3, 17, released=(3,))
    pool.reserve(ONE, 3, 17, released=(1,))
    assert pool.free_tokens == 0
    with pytest.raises(RequestError, match="released ones are gone"):
        pool.truncate(ONE, 1, 0)
    step(pool, chain((0, 0, 3), (2, 0, 2)), 1)
    assert pool.lengths(ONE) == (3, 0, 2)
    pool.check_integrity()
    pool.free(ONE)
    assert pool.free_tokens == 64
    pool.check_integrity()


@both
def test_reservation_counts_whole_pages(make: MakePool) -> None:
    pool = make(10, 100, 16)
    assert (pool.total_tokens, pool.free_tokens) == (160, 160)
    pool.reserve(ONE, 3, 17)
    assert pool.free_tokens == 160 - 3 * 32
    with pytest.raises(KVFull, match=r"80 KV tokens asked for .* 64 of 160 free"):
        pool.reserve(TWO, 1, 65)
    assert pool.free_tokens == 64
    pool.reserve(TWO, 1, 64)
    assert pool.free_tokens == 0
    pool.release(ONE, 1)
    assert pool.free_tokens == 32
    assert pool.lengths(ONE) == (0, 0, 0)
    pool.free(ONE)
    pool.free(ONE)
    pool.free(TWO)
    assert pool.free_tokens == 160
    pool.check_integrity()


@both
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda pool: pool.reserve(ONE, 1, 5), "already open"),
        (lambda pool: pool.reserve(TWO, 0, 5), "must be positive"),
        (lambda pool: pool.reserve(TWO, 1, 0), "must be positive"),
        (lambda pool: pool.reserve(TWO, 1, 101), "longer than the 100"),
        (lambda pool: pool.lengths(TWO), "not open"),
        (lambda pool: pool.release(ONE, 3), "no sequence 3"),
        (lambda pool: pool.release(ONE, 2), "no sequence 2"),
        (lambda pool: pool.truncate(ONE, 0, 6), "can't be cut to 6"),
        (lambda pool: pool.truncate(ONE, 0, -1), "can't be cut"),
        (lambda pool: pool.keep(ONE, 0, 3, [1, 0]), "must ascend"),
        (lambda pool: pool.keep(ONE, 0, 3, [2]), "within what is held"),
        (lambda pool: pool.fork(ONE, [(0, 1), (0, 1)]), "twice"),
        (lambda pool: pool.fork(ONE, [(0, 2)]), "no sequence 2"),
        (lambda pool: pool.begin([BatchItem(ONE, chain((0, 4, 1)))]), "holds 5 tokens"),
        (lambda pool: pool.begin([BatchItem(ONE, chain((0, 5, 26)))]), "pass max_length 30"),
        (lambda pool: pool.begin([BatchItem(ONE, chain((0, 5, 1), (2, 0, 1)))]), "no sequence 2"),
        (lambda pool: pool.begin([BatchItem(ONE, chain((0, 5, 1)))] * 2), "same sequence twice"),
        (lambda pool: pool.begin([]), "at least one"),
        (lambda pool: pool.export(ONE, 0, 2, 0, 6), "holds 5 tokens"),
        (lambda pool: pool.export(ONE, 0, 4, 0, 5), "block 4"),
        (lambda pool: pool.load(ONE, 0, 2, *numbers(3, 0)[1:]), "holds 5"),
        (lambda pool: pool.load(ONE, 1, 2, *numbers(31, 0)[1:]), "takes up to 30"),
    ],
)
def test_mistakes_are_refused_and_change_nothing(
    make: MakePool, mistake: Callable[[KVPool], object], said: str
) -> None:
    pool = make(20, 100, 16)
    pool.reserve(ONE, 3, 30)
    step(pool, chain((0, 0, 5)), 1)
    pool.release(ONE, 2)
    free = pool.free_tokens
    with pytest.raises(RequestError, match=said):
        mistake(pool)
    assert pool.free_tokens == free
    assert pool.lengths(ONE) == (5, 0, 0)
    pool.check_integrity()
    step(pool, chain((0, 5, 1), (1, 0, 2)), 2)


@both
def test_a_step_in_flight_locks_its_sequences_only(make: MakePool) -> None:
    pool = make(20, 100, 16)
    pool.reserve(ONE, 2, 30)
    plan = pool.begin([BatchItem(ONE, chain((0, 0, 5)))])
    assert pool.lengths(ONE) == (5, 0)
    changes: list[Callable[[], object]] = [
        lambda: pool.free(ONE),
        lambda: pool.release(ONE, 0),
        lambda: pool.truncate(ONE, 0, 2),
        lambda: pool.fork(ONE, [(1, 0)]),
        lambda: pool.begin([BatchItem(ONE, chain((0, 5, 1)))]),
    ]
    for change in changes:
        with pytest.raises(RequestError, match="in flight"):
            change()
    step(pool, chain((1, 0, 3)), 4)
    pool.abort(plan)
    assert pool.lengths(ONE) == (0, 3)
    with pytest.raises(RequestError, match="has ended"):
        pool.attend(plan, 2, *numbers(5, 1), scaling=1.0)
    with pytest.raises(RequestError, match="has ended"):
        pool.finish(plan)


@pytest.mark.parametrize("total", [0, -5])
def test_a_pool_needs_room(total: int) -> None:
    with pytest.raises(SettingsError, match="must be positive"):
        make_pool(SHAPE, total, max_length=10)


def test_cuda_pages_fit_the_kernel() -> None:
    shape = KVShape(Span(0, 1), 1, 16, torch.float16, torch.device("cuda"))
    with pytest.raises(SettingsError, match="multiples of 256"):
        make_pool(shape, 1000, max_length=10, page_tokens=64)


@both
def test_beams_reorder_like_assignments(make: MakePool) -> None:
    """Forty random reorders with decode steps between, against the plain pool."""
    pools: list[KVPool] = [make(60, 100, 16), PlainPool(SHAPE, 960, 16)]
    chance = random.Random(3)
    for pool in pools:
        pool.reserve(ONE, 5, 100)
        step(pool, chain((0, 0, 37)), 0)
        pool.fork(ONE, [(beam, 0) for beam in range(1, 5)])
    for turn in range(40):
        copies = [(beam, chance.randrange(5)) for beam in chance.sample(range(5), 4)]
        table = chain(*((beam, 37 + turn, 1) for beam in range(5)))
        fast, plain = (step(pool, table, turn) for pool in pools)
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)
        for pool in pools:
            pool.fork(ONE, copies)
            pool.check_integrity()


@both
@pytest.mark.parametrize("window", [None, 30])
def test_long_trees_see_their_ancestors(make: MakePool, window: int | None) -> None:
    """More nodes than a tile, over a tile's edge."""
    pools: list[KVPool] = [make(60, 400, 16), PlainPool(SHAPE, 960, 16)]
    chance = random.Random(5)
    parents = tuple(chance.randrange(-1, node) if node else -1 for node in range(90))
    results = []
    for pool in pools:
        pool.reserve(ONE, 1, 400)
        step(pool, chain((0, 0, 100)), 0)
        results.append(step(pool, PackedTable((0,), (100,), (90,), parents), 1, window=window))
        pool.keep(ONE, 0, 100, [0, 3, 4, 50, 89])
        assert pool.lengths(ONE) == (105,)
        results.append(step(pool, chain((0, 105, 1)), 2))
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(results[1], results[3], rtol=0, atol=1e-5)


@both
@pytest.mark.parametrize("cuts", [[200], [64, 128, 200], [1, 2, 130, 199, 200]])
def test_chunks_add_up_to_the_prompt(make: MakePool, cuts: list[int]) -> None:
    whole, cut = make(60, 400, 16), make(60, 400, 16)
    for pool in (whole, cut):
        pool.reserve(ONE, 1, 300)
    inputs = numbers(200, 7)
    results: list[torch.Tensor] = []
    for pool, stops in ((whole, [200]), (cut, cuts)):
        start, parts = 0, []
        for stop in stops:
            plan = pool.begin([BatchItem(ONE, chain((0, start, stop - start)))])
            piece = [part[start:stop] for part in inputs]
            parts.append([pool.attend(plan, block, *piece, scaling=0.3) for block in (2, 3)][0])
            pool.finish(plan)
            start = stop
        results.append(torch.cat(parts))
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


@both
@pytest.mark.parametrize("count", [1, 4, 40])
def test_strides_do_not_matter(make: MakePool, count: int) -> None:
    """Transformers hands over [1, H, T, E]; the same bits come out."""
    pool = make(60, 100, 16)
    pool.reserve(ONE, 3, 100)
    parts = numbers(3 * count, 1)
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    results = []
    for inputs in (parts, turned):
        plan = pool.begin([BatchItem(ONE, chain(*((row, 0, count) for row in range(3))))])
        results.append(pool.attend(plan, 2, *inputs, scaling=0.3))
        pool.abort(plan)
    assert torch.equal(*results)


@both
def test_poison_stays_where_it_was_written(make: MakePool) -> None:
    """Rejected, aborted or freed NaN and inf never reach a later result."""
    pool, clean = make(60, 400, 16), make(60, 400, 16)
    poison = [torch.full((300, heads, SIZE), torch.nan) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    poison[2][::2] = torch.inf
    pool.reserve(TWO, 3, 320)
    for ends in (pool.abort, pool.finish):
        plan = pool.begin([BatchItem(TWO, chain((0, 0, 100), (1, 0, 100), (2, 0, 100)))])
        for block in (2, 3):
            pool.attend(plan, block, *poison, scaling=1.0)
        ends(plan)
    pool.truncate(TWO, 0, 0)
    pool.keep(TWO, 1, 0, [])
    clean.reserve(TWO, 3, 320)
    prompt, token = chain((0, 0, 70), (1, 0, 5)), chain((0, 70, 1), (1, 5, 1))
    got, expected = ((step(one, prompt, 3, TWO), step(one, token, 4, TWO)) for one in (pool, clean))
    assert torch.isfinite(got[1]).all()
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    pool.free(TWO)
    pool.reserve(ONE, 3, 320)
    fresh = step(pool, chain((0, 0, 1), (1, 0, 40), (2, 0, 3)), 5)
    assert torch.isfinite(fresh).all()
    pool.check_integrity()


@both
def test_an_import_counts_when_all_blocks_are_there(make: MakePool) -> None:
    pool = make(60, 100, 16)
    pool.reserve(ONE, 2, 50)
    step(pool, chain((0, 0, 20)), 1)
    parts = {block: pool.export(ONE, 0, block, 0, 20) for block in (2, 3)}
    pool.load(ONE, 1, 2, *parts[2])
    assert pool.lengths(ONE) == (20, 0)
    pool.check_integrity()
    with pytest.raises(RequestError, match="import is unfinished"):
        pool.begin([BatchItem(ONE, chain((1, 0, 1)))])
    with pytest.raises(RequestError, match="takes 20 more tokens of 20, not 19"):
        pool.load(ONE, 1, 3, *(part[:19] for part in parts[3]))
    pool.load(ONE, 1, 3, *parts[3])
    assert pool.lengths(ONE) == (20, 20)
    for block in (2, 3):
        assert torch.equal(pool.export(ONE, 1, block, 3, 20)[1], parts[block][1][3:])
    pool.truncate(ONE, 1, 0)
    pool.load(ONE, 1, 2, *parts[2])
    pool.truncate(ONE, 1, 0)
    pool.check_integrity()
    step(pool, chain((1, 0, 2)), 3)


@both
def test_an_import_in_pieces_on_some_of_the_blocks(make: MakePool) -> None:
    pool = make(60, 100, 16)
    pool.reserve(ONE, 3, 50)
    step(pool, chain((0, 0, 37)), 1)
    key, value = pool.export(ONE, 0, 3, 0, 37)
    pool.expect(ONE, 1, 37, Span(3, 4))
    for first, stop in ((0, 16), (16, 17), (17, 37)):
        with pytest.raises(RequestError, match="import is unfinished"):
            pool.begin([BatchItem(ONE, chain((1, 0, 1)))])
        with pytest.raises(RequestError, match="takes 0 more tokens"):
            pool.load(ONE, 1, 2, key[:1], value[:1])
        pool.check_integrity()
        assert pool.lengths(ONE) == (37, 0, 0)
        pool.load(ONE, 1, 3, key[first:stop], value[first:stop])
    assert pool.lengths(ONE) == (37, 37, 0)
    pool.check_integrity()
    for piece, whole in zip(pool.export(ONE, 1, 3, 0, 37), (key, value), strict=True):
        assert torch.equal(piece, whole)
    assert not any(part.any() for part in pool.export(ONE, 1, 2, 0, 37))


@both
def test_an_import_that_does_not_fit_is_refused(make: MakePool) -> None:
    pool = make(60, 100, 16)
    pool.reserve(ONE, 2, 50)
    step(pool, chain((0, 0, 20)), 1)
    key, value = pool.export(ONE, 0, 2, 0, 20)
    for sequence, tokens, span in ((0, 5, None), (1, 51, None), (1, 0, None), (1, 5, Span(1, 4))):
        with pytest.raises(RequestError):
            pool.expect(ONE, sequence, tokens, span)
    pool.expect(ONE, 1, 12)
    with pytest.raises(RequestError, match="takes 12 more tokens of 12, not 20"):
        pool.load(ONE, 1, 2, key, value)
    pool.load(ONE, 1, 2, key[:10], value[:10])
    with pytest.raises(RequestError, match="takes 2 more"):
        pool.load(ONE, 1, 2, key[:10], value[:10])
    pool.truncate(ONE, 1, 0)
    pool.check_integrity()
    step(pool, chain((1, 0, 2)), 3)
    assert pool.lengths(ONE) == (20, 2)
