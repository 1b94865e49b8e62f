"""The scheduler keeps order, budget and turns; nobody starves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import Phase, SessionId
from bloombee.server.scheduler import DECODING_PASSES, Budget, Scheduler, WorkItem
from tests.fifo import Fifo
from tests.scheduling import BUDGET, OTHER, SPAN, A, B, Bench, C, batch, prompt, tree, work

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = [
    ("one item", [work(0)], [[(0, 1)]]),
    ("sessions decode together", [work(0, A), work(1, B), work(2, C)], [[(0, 1), (1, 1), (2, 1)]]),
    ("parts of one session that share nothing too",
     [work(0, A, touches={0, 1}), work(1, A, touches={2})], [[(0, 1), (1, 1)]]),
    ("verify joins decode", [work(0, A), tree(1, B, 5)], [[(0, 1), (1, 5)]]),
    ("decode first, then what came before it", [prompt(0, B, 8), work(1, A)], [[(1, 1)], [(0, 8)]]),
    ("a long prompt is cut to a pass", [prompt(0, A, 100)], [[(0, 64)], [(0, 36)]]),
    ("to a chunk while others decode", [prompt(0, A, 40), work(1, B)],
     [[(1, 1)], [(0, 16)], [(0, 16)], [(0, 8)]]),
    ("short prompts merge", [prompt(0, A, 30), prompt(1, B, 30)], [[(0, 30), (1, 30)]]),
    ("what is left of a pass goes to the next", [prompt(0, A, 30), prompt(1, B, 50)],
     [[(0, 30), (1, 34)], [(1, 16)]]),
    ("a tree is never cut", [tree(0, A, 100), work(1, B)], [[(0, 100)], [(1, 1)]]),
    ("nor started when it does not fit", [work(0, B), tree(1, A, 64), work(2, C)],
     [[(0, 1), (2, 1)], [(1, 64)]]),
    ("a later step waits for one that touches its sequence",
     [prompt(0, A, 4), work(1, A), work(2, B)], [[(2, 1)], [(0, 4)], [(1, 1)]]),
    ("spans take turns", [work(0, A), replace(work(1, B), span=OTHER), work(2, C)],
     [[(0, 1), (2, 1)], [(1, 1)]]),
]  # fmt: skip


@pytest.mark.parametrize(("queue", "passes"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_policy(queue: list[WorkItem], passes: list[list[tuple[int, int]]]) -> None:
    assert Bench(queue=queue).drain() == passes


def test_nothing_waits() -> None:
    assert Scheduler(BUDGET).next_batch([]) == ()


def test_a_prompt_and_a_stream_of_tokens_alternate() -> None:
    bench = Bench(queue=[prompt(0, A, 48)])
    seen: list[tuple[int, int]] = []
    for arrival in range(1, 9):
        bench.queue.append(work(arrival, B))
        seen += bench.run()
    assert seen[:6] == [(1, 1), (0, 16), (2, 1), (0, 16), (3, 1), (0, 16)]


def test_whole_passes_again_once_nobody_decodes() -> None:
    bench = Bench(queue=[prompt(0, A, 1000), work(1, B)])
    sizes = [passes[0][1] for passes in bench.drain()]
    assert sizes[: DECODING_PASSES + 1] == [1, *[16] * (DECODING_PASSES - 1), 64]


def test_a_client_with_many_prompts_does_not_hold_up_another() -> None:
    many = [work(n, A, Phase.PREFILL, 64, touches={n}) for n in range(10)]
    bench = Bench(queue=[*many, prompt(10, B, 64)])
    order = [passes[0][0] for passes in bench.drain()]
    assert order.index(10) <= 1
    assert [each for each in order if each != 10] == list(range(10))


def test_a_client_that_comes_back_does_not_catch_up() -> None:
    bench = Bench(queue=[work(n, A, Phase.PREFILL, 64, touches={n}) for n in range(6)])
    for _ in range(5):
        bench.run()
    bench.queue += [work(n, B, Phase.PREFILL, 64, touches={n}) for n in range(10, 14)]
    bench.queue += [work(n, A, Phase.PREFILL, 64, touches={n}) for n in range(20, 24)]
    owners = [bench.run()[0][0] // 10 == 1 for _ in range(6)]
    assert owners.count(True) == 3


KINDS: dict[str, Callable[[int], WorkItem]] = {
    "a token": lambda n: work(n, B, touches={1000 + n}),
    "a prompt of another client": lambda n: prompt(n, C, 64),
    "a token on another span": lambda n: replace(work(n, C, touches={n}), span=OTHER),
    "a prompt on another span": lambda n: replace(prompt(n, C, 64), span=OTHER),
}


@pytest.mark.parametrize("flood", KINDS)
@pytest.mark.parametrize("victim", [work(0), prompt(0, A, 64), tree(0, A, 64)])
@pytest.mark.parametrize("background", [False, True], ids=["interactive", "background"])
def test_nobody_starves_in_a_flood(flood: str, victim: WorkItem, *, background: bool) -> None:
    """Two new items of a kind come before every pass, for as long as the victim waits."""
    bench = Bench(queue=[replace(victim, background=background)])
    arrival = 1
    for passes in range(60):
        bench.queue += [KINDS[flood](arrival), KINDS[flood](arrival + 1)]
        arrival += 2
        bench.run()
        if any(item.arrival == 0 for item in bench.finished):
            assert passes <= 12
            return
    raise AssertionError("it still waits")


FEW = [
    ("no more than asked for", [work(n, touches={n}) for n in range(5)],
     [[(0, 1), (1, 1)], [(2, 1), (3, 1)], [(4, 1)]]),
    ("a larger micro-batch goes alone, and whole", [batch(0, A, 9), batch(1, B, 1)],
     [[(0, 9)], [(1, 1)]]),
    ("what fits beside it goes along", [batch(0, A, 1), batch(1, B, 2), batch(2, C, 1)],
     [[(0, 1), (2, 1)], [(1, 2)]]),
    ("a tree counts as its sequence", [tree(0, A, 9), tree(1, B, 9), work(2, C)],
     [[(0, 9), (1, 9)], [(2, 1)]]),
    ("prompts are no matter", [prompt(0, A, 9), prompt(1, B, 9)], [[(0, 9), (1, 9)]]),
]  # fmt: skip


@pytest.mark.parametrize(("queue", "passes"), [c[1:] for c in FEW], ids=[c[0] for c in FEW])
def test_two_decode_rows_a_pass(queue: list[WorkItem], passes: list[list[tuple[int, int]]]) -> None:
    assert Bench(Scheduler(replace(BUDGET, decode_rows=2)), queue).drain() == passes


def test_decode_rows_change_from_the_next_pass_on() -> None:
    scheduler = Scheduler(BUDGET)
    bench = Bench(scheduler, [work(n, touches={n}) for n in range(9)])
    scheduler.set_decode_rows(2)
    sizes = [len(bench.run())]
    scheduler.set_decode_rows(4)
    sizes.append(len(bench.run()))
    scheduler.set_decode_rows(None)
    assert [*sizes, len(bench.run())] == [2, 4, 3]


@settings(max_examples=100, deadline=None)
@given(
    ahead=st.lists(st.integers(1, 8), max_size=12),
    mine=st.integers(1, 8),
    flood=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    limit=st.integers(1, 12),
    prompts=st.booleans(),
)
def test_a_decode_row_waits_for_those_before_it_only(
    ahead: list[int], mine: int, flood: list[int], limit: int, *, prompts: bool
) -> None:
    """Others send as many more before every pass: it waits as long as if they didn't.

    Of the decode passes before its own, any two in a row are of more rows than the limit, or
    else the first of the second would have gone along.
    """
    sizes = [*ahead, mine]
    queue = [batch(n, SessionId(bytes([n]) * 16), rows) for n, rows in enumerate(sizes)]
    bench = Bench(Scheduler(replace(BUDGET, decode_rows=limit)), queue)
    most = 2 * sum(ahead) // (limit + 1) + 2
    for turn in range(2 * most):
        first = 100 + turn * 10
        bench.queue += [
            batch(first + n, SessionId(bytes([50 + n]) * 16), rows) for n, rows in enumerate(flood)
        ]
        if prompts:
            bench.queue.append(prompt(first + 9, SessionId(bytes([99]) * 16), 64))
        bench.run()
        if any(item.arrival == len(ahead) for item in bench.finished):
            return
    raise AssertionError("it still waits")


items = st.builds(
    lambda session, phase, tokens, touches, span, cut, background: replace(
        work(0, session, phase, tokens, touches),
        span=span,
        divisible=cut or phase is Phase.DECODE,
        background=background,
    ),
    session=st.sampled_from([A, B, C]),
    phase=st.sampled_from(list(Phase)),
    tokens=st.integers(1, 90),
    touches=st.frozensets(st.integers(0, 3), min_size=1),
    span=st.sampled_from([SPAN, OTHER]),
    cut=st.booleans(),
    background=st.booleans(),
)
lives = st.lists(st.lists(items, max_size=4), max_size=8)


def _numbered(raw: list[list[WorkItem]]) -> list[list[WorkItem]]:
    count = iter(range(1000))
    return [[replace(item, arrival=next(count)) for item in arriving] for arriving in raw]


@settings(max_examples=300, deadline=None)
@given(lives, st.integers(8, 64), st.integers(4, 64), st.none() | st.integers(1, 8))
def test_like_the_twin_it_runs_everything_once_and_in_order(
    raw: list[list[WorkItem]], tokens: int, chunk: int, rows: int | None
) -> None:
    arrivals = _numbered(raw)
    budget = replace(Budget.of(tokens, chunk), decode_rows=rows)
    bench, twin = Bench(Scheduler(budget)), Bench(Fifo(budget))
    for arriving in arrivals:
        for each in (bench, twin):
            each.queue += arriving
        shares = bench.scheduler.next_batch(bench.queue)
        spent = sum(share.tokens for share in shares)
        assert bool(shares) == bool(bench.queue)
        assert spent <= tokens or (len(shares) == 1 and not shares[0].item.divisible)
        assert len({share.item.span for share in shares}) <= 1
        assert len({share.item.is_prompt for share in shares}) <= 1
        decoding = sum(share.item.rows for share in shares if not share.item.is_prompt)
        assert rows is None or decoding <= rows or len(shares) == 1
        touched = [(s.item.session, n) for s in shares for n in s.item.touches]
        assert len(set(touched)) == len(touched)
        bench.run()
        twin.run()
    bench.drain()
    twin.drain()
    assert {i.arrival for i in bench.finished} == {i.arrival for i in twin.finished}
    for session in (A, B, C):
        for sequence in range(4):
            mine, theirs = (
                [i.arrival for i in b.finished if i.session == session and sequence in i.touches]
                for b in (bench, twin)
            )
            assert mine == theirs
