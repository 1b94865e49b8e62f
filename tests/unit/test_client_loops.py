"""Loops of tokens in the client's books, micro-batches, and tokens handed to a reader."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.client.decoding import Mailbox
from bloombee.client.history import History
from bloombee.client.ledger import NO_OPERATIONS, Ledger, PendingStep, Standing
from bloombee.client.looping import Loop
from bloombee.client.micro_batches import Strand
from bloombee.client.payloads import encode_ids
from bloombee.client.split import Part, split
from bloombee.client.tokens import Line, Token
from bloombee.core import PackedTable
from bloombee.errors import ProtocolError
from bloombee.planner.micro_batching import usual_count
from bloombee.protocol.messages import Operations, Output, Payload, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STANDING = Standing(bytes(16), 3, 500)


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """Answers are futures of a running loop."""
    with asyncio.Runner() as runner:
        asyncio._set_running_loop(runner.get_loop())
        yield
        asyncio._set_running_loop(None)


class Books:
    """The books of a session in which prompts of 3 and 2 tokens begin a loop."""

    def __init__(self, *samplings: Sampling, parts: int = 5) -> None:
        self.told: list[Token] = []
        self.ledger = Ledger(2)
        self.history = History(2)
        self.table = PackedTable((0, 1), (0, 0), (3, 2))
        self.history.append(self.table, [11, 12, 13, 21, 22])
        self.lines = [Line(7 + row, row, each) for row, each in enumerate(samplings)]
        self.loop = Loop(self.lines, self.history, self.ledger, self.told.extend)
        cut = list(split(self.table, "last", parts))
        self.steps = [self._enter(part, is_whole=len(cut) == 1) for part in cut]

    def _enter(self, part: Part, *, is_whole: bool) -> PendingStep:
        step = PendingStep(
            self.ledger.number(), part, NO_OPERATIONS, "prefill", *encode_ids([0] * part.stop)
        )
        self.loop.attach(step, is_whole=is_whole)
        self.ledger.enter(step)
        return step

    def answer(
        self,
        number: int,
        ids: Sequence[int],
        sequences: tuple[int, ...],
        positions: tuple[int, ...],
        finished: tuple[Any, ...] | None = None,
    ) -> PendingStep | None:
        output = Output(
            bytes(16),
            3,
            number,
            Payload("ids", "int32", len(ids), 1),
            sequences=sequences,
            positions=positions,
            finished=finished or ("",) * len(ids),
        )
        self.ledger.take(output, memoryview(np.array(ids, "<i4").tobytes()))
        return self.ledger.oldest


def test_a_loop_is_entered_as_its_answers_come() -> None:
    books = Books(Sampling(4), Sampling(3, stop_ids=(9,)))
    (begun,) = books.steps
    assert (begun.number, begun.until, books.ledger.numbered) == (1, 4, 4)
    message = begun.message(STANDING, 0)
    assert message.loop
    assert [each.budget for each in message.sampling if each] == [4, 3]

    second = books.answer(1, [5, 6], (0, 1), (3, 2))
    assert second is not None
    assert (second.number, second.sent, second.until) == (2, True, 4)
    assert (second.part.table.sequences, second.part.table.first_positions) == ((0, 1), (3, 2))
    assert books.history.lengths == [4, 3]
    assert books.ledger.expects(4)
    assert not books.ledger.expects(5)

    third = books.answer(2, [8, 9], (0, 1), (4, 3), ("", "stop"))
    assert third is not None
    assert third.part.table.sequences == (0,)
    resent = third.message(STANDING, 2)
    assert [(each.budget, each.drawn) for each in resent.sampling if each] == [(2, 2)]
    assert books.answer(3, [1], (0,), (5,)) is not None
    assert books.answer(4, [2], (0,), (6,), ("length",)) is None
    assert not books.ledger.expects(5)
    assert [(t.row, t.id, t.finished) for t in books.told] == [
        (7, 5, ""),
        (8, 6, ""),
        (7, 8, ""),
        (8, 9, "stop"),
        (7, 1, ""),
        (7, 2, "length"),
    ]
    assert [list(books.history.entries(row)) for row in (0, 1)] == [
        [11, 12, 13, 5, 8, 1],
        [21, 22, 6],
    ]


def test_prompts_in_parts_choose_where_they_end_and_loop_afterwards() -> None:
    books = Books(Sampling(3), Sampling(1), parts=2)
    first, second, third = books.steps
    assert [each.until for each in books.steps] == [0, 0, 0]
    assert first.message(STANDING, 0).sampling == ()
    assert [each is None for each in second.message(STANDING, 0).sampling] == [False, True]
    assert [each is None for each in third.message(STANDING, 0).sampling] == [False]
    books.ledger.take(Output(bytes(16), 3, 1, Payload("rows", "float32", 0, 0)), memoryview(b""))
    books.answer(2, [5], (0,), (3,))
    assert books.answer(3, [6], (1,), (2,), ("length",)) is None
    following = books.loop.begin()
    assert following is not None
    assert (following.number, following.until, following.sent) == (4, 5, False)
    assert following.part.table.sequences == (0,)


def test_penalties_travel_with_all_ids_so_far() -> None:
    sampling = Sampling(4, repetition_penalty=1.5, context=np.array([1, 2], "<i4").tobytes())
    books = Books(sampling, Sampling(4))
    following = books.answer(1, [5, 6], (0, 1), (3, 2))
    assert following is not None
    told = following.message(STANDING, 1).sampling
    assert [np.frombuffer(each.context, "<i4").tolist() for each in told if each] == [[1, 2, 5], []]


@pytest.mark.parametrize(
    "answer",
    [
        ([5], (0,), (3,)),
        ([5, 6], (1, 0), (2, 3)),
        ([5, 6], (0, 1), (3, 3)),
        ([5, 6], (0, 1), (3, 2), ("",)),
        ([5, 6], (0, 1), (3, 2), ("", "")),
    ],
    ids=["too few", "order", "position", "ends", "beyond the budget"],
)
def test_an_answer_that_does_not_fit_changes_nothing(answer: Any) -> None:
    books = Books(Sampling(3), Sampling(1))
    with pytest.raises(ProtocolError):
        books.answer(1, *answer)
    assert books.ledger.oldest is books.steps[0]
    assert (books.told, books.history.lengths) == ([], [3, 2])


def test_what_stages_hold_too_much_is_cut_with_the_next_step() -> None:
    history = History(4)
    for sequence in range(4):
        history.restore(sequence, [1] * (3 + sequence))
    history.ahead = {0, 1, 2}
    told = history.apply(Operations(forks=((3, 1), (2, 3)), truncates=((0, 2),)))
    # 2 is now a copy of what 3 was, which is not ahead; 3 is one of 1, which is.
    assert told == Operations(forks=((3, 1), (2, 3)), truncates=((0, 2), (1, 4), (3, 4)))
    assert history.lengths == [2, 4, 6, 4]
    assert history.apply(NO_OPERATIONS) == NO_OPERATIONS


# Micro-batches -----------------------------------------------------------------------------


@given(
    groups=st.integers(1, 12), repeats=st.integers(1, 6), count=st.integers(1, 80), start=st.just(5)
)
def test_every_row_is_in_one_micro_batch(groups: int, repeats: int, count: int, start: int) -> None:
    rows = groups * repeats
    prompts = tuple([row // repeats] for row in range(rows))
    strand = Strand(start, prompts, tuple(Sampling(1 + row) for row in range(rows)), repeats)
    found = strand.split(min(count, rows))
    assert [p for each in found for p in each.prompts] == list(prompts)
    assert [s for each in found for s in each.samplings] == list(strand.samplings)
    firsts = [start]
    for each in found:
        firsts.append(firsts[-1] + len(each.prompts))
        size = each.repeats
        for first in range(0, len(each.prompts), size):
            group = each.prompts[first : first + size]
            assert group == (each.prompts[first],) * size
    assert [each.first_row for each in found] == firsts[:-1]
    assert len(found) == count if count <= groups else len(found) >= min(count, rows)


def test_how_many_micro_batches_are_chosen() -> None:
    assert [usual_count(rows, 3) for rows in (1, 7, 8, 15, 16, 64)] == [1, 1, 2, 3, 4, 4]
    assert usual_count(64, 1) == 1
    assert usual_count(64, 2) == 3


# Tokens handed over ------------------------------------------------------------------------


def test_tokens_of_another_thread_reach_the_reader_in_order() -> None:
    async def read() -> list[int]:
        mailbox = Mailbox()

        def write() -> None:
            for number in range(0, 5000, 5):
                mailbox.put([Token(0, number + i) for i in range(5)])
            mailbox.close()

        thread = threading.Thread(target=write)
        thread.start()
        told = [token.id async for token in mailbox]
        thread.join()
        await mailbox.closed()
        return told

    asyncio._set_running_loop(None)
    assert asyncio.run(read()) == list(range(5000))


def test_a_reader_that_leaves_at_a_token_after_the_last_came_is_not_left_waiting() -> None:
    async def read() -> int:
        mailbox = Mailbox()
        mailbox.put([Token(0, 7), Token(0, 8)])
        mailbox.close()
        async for token in mailbox:
            await asyncio.wait_for(mailbox.closed(), 5)
            return token.id
        return -1

    asyncio._set_running_loop(None)
    assert asyncio.run(read()) == 7
