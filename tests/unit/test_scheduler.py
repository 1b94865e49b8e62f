"""The scheduler keeps order, budget and its merging rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.core import Phase, SessionId, Span
from bloombee.server.scheduler import Budget, Share, WorkItem, next_batch

A, B, C = (SessionId(bytes([letter]) * 16) for letter in b"ABC")
SPAN = Span(0, 4)


def work(
    arrival: int,
    session: SessionId = A,
    phase: Phase = Phase.DECODE,
    tokens: int = 1,
    touches: frozenset[int] = frozenset({0}),
) -> WorkItem:
    return WorkItem(
        arrival=arrival,
        session=session,
        step=arrival + 1,
        phase=phase,
        span=SPAN,
        tokens=tokens,
        touches=touches,
    )


def picked(queue: list[WorkItem], tokens: int = 64) -> list[tuple[int, int]]:
    return [(share.item.arrival, share.tokens) for share in next_batch(queue, Budget(tokens))]


def prefill(arrival: int, session: SessionId, tokens: int) -> WorkItem:
    return work(arrival, session, Phase.PREFILL, tokens)


CASES = [
    ("nothing waits", [], 64, []),
    ("one item", [work(0)], 64, [(0, 1)]),
    ("three sessions decode together", [work(0, A), work(1, B), work(2, C)], 64,
     [(0, 1), (1, 1), (2, 1)]),
    ("verify joins decode", [work(0, A), work(1, B, Phase.VERIFY, 5)], 64, [(0, 1), (1, 5)]),
    ("prefill stays apart from decode", [work(0, A), prefill(1, B, 8), work(2, C)], 64,
     [(0, 1), (2, 1)]),
    ("a long prompt is cut", [prefill(0, A, 100)], 64, [(0, 64)]),
    ("a cut prompt leaves no room", [prefill(0, A, 64), prefill(1, B, 1)], 64, [(0, 64)]),
    ("short prompts merge", [prefill(0, A, 30), prefill(1, B, 30)], 64, [(0, 30), (1, 30)]),
    ("what does not fit is passed over", [prefill(0, A, 30), prefill(1, B, 40), prefill(2, C, 10)],
     64, [(0, 30), (2, 10)]),
    ("one share a session",
     [work(0, A, touches=frozenset({0})), work(1, A, touches=frozenset({1}))], 64, [(0, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("queue", "tokens", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_policy(queue: list[WorkItem], tokens: int, expected: list[tuple[int, int]]) -> None:
    assert picked(queue, tokens) == expected


def test_a_draft_tree_is_never_cut() -> None:
    tree = replace(work(0, A, Phase.VERIFY, 100), divisible=False)
    assert next_batch([tree, work(1, B)], Budget(64)) == (Share(tree, 100),)


def test_other_spans_run_by_themselves() -> None:
    assert picked([work(0, A), replace(work(1, B), span=Span(0, 2)), work(2, C)]) == [
        (0, 1),
        (2, 1),
    ]


def test_a_later_step_never_overtakes_one_that_touches_its_sequence() -> None:
    long = work(1, B, Phase.PREFILL, 9)
    assert picked([work(0, A), long, work(2, B)]) == [(0, 1)]
    assert picked([work(0, A), long, replace(work(2, B), touches=frozenset({3}))]) == [
        (0, 1),
        (2, 1),
    ]


items = st.builds(
    work,
    arrival=st.just(0),
    session=st.sampled_from([A, B, C]),
    phase=st.sampled_from(list(Phase)),
    tokens=st.integers(1, 40),
    touches=st.frozensets(st.integers(0, 3), min_size=1),
)


@given(st.lists(items, max_size=12), st.integers(1, 32))
def test_everything_runs_once_in_order_and_within_budget(raw: list[WorkItem], tokens: int) -> None:
    queue = [replace(item, arrival=number) for number, item in enumerate(raw)]
    total, ran, done = sum(item.tokens for item in queue), 0, []
    while queue:
        shares = next_batch(queue, Budget(tokens))
        assert shares and shares[0].item is queue[0]
        assert sum(share.tokens for share in shares) <= tokens
        assert len({share.item.session for share in shares}) == len(shares)
        progress = {share.item.arrival: share for share in shares}
        ran += sum(share.tokens for share in shares)
        done += [share.item for share in shares if share.finishes]
        queue = [
            replace(item, tokens=item.tokens - progress[item.arrival].tokens)
            if item.arrival in progress
            else item
            for item in queue
            if item.arrival not in progress or not progress[item.arrival].finishes
        ]
    assert ran == total
    for session in (A, B, C):
        for sequence in range(4):
            arrivals = [i.arrival for i in done if i.session == session and sequence in i.touches]
            assert arrivals == sorted(arrivals)
