"""The book of sequences across epochs: repeats, replays, what is touched, and moving house."""

from __future__ import annotations

from typing import Any

import pytest

from bloombee.core import Span
from bloombee.errors import BloomBeeError, ProtocolError, RequestError
from bloombee.protocol.messages import Operations, Step
from bloombee.server.sequences import SequenceBook, Taken
from bloombee.server.validation import NO_OPERATIONS, Terms
from tests.unit.test_sessions_validation import step

TERMS = Terms(epoch=3, span=Span(2, 8), sequences=4, max_length=50)
NEW, REPEATED, EARLIER = Taken.NEW, Taken.REPEATED, Taken.EARLIER


def replay(number: int, rows: dict[int, tuple[int, int]], **changes: Any) -> Step:
    changes = {"replay": True, "until": 8, "as_of": 4} | changes
    return step(number, rows, **changes)


def book_of(*steps: Step) -> SequenceBook:
    book = SequenceBook(TERMS)
    for each in steps:
        assert book.take(each) is NEW
    return book


class TestNewestSteps:
    def test_tokens_and_operations_touch(self) -> None:
        book = book_of(step(1, {0: (0, 5), 1: (0, 2)}), step(2, {1: (2, 1)}))
        assert book.newest_steps == (1, 2, 0, 0)
        moves = Operations(forks=((2, 0),), truncates=((1, 1),), releases=(3,))
        book.take(step(5, {0: (5, 1)}, moves))
        assert book.newest_steps == (5, 5, 5, 5)

    def test_a_refused_step_touches_nothing(self) -> None:
        book = book_of(step(1, {0: (0, 5)}))
        with pytest.raises(ProtocolError):
            book.take(step(2, {0: (4, 1)}, Operations(forks=((1, 0),))))
        assert book.newest_steps == (1, 0, 0, 0)


class TestEarlierEpochs:
    def test_a_step_of_one_is_answered_again_once(self) -> None:
        parts = [step(1, {0: (0, 5)}), step(2, {0: (5, 5)}), step(3, {0: (10, 5), 1: (0, 1)})]
        book = book_of(*parts)
        book.begin_epoch()
        for part in parts:
            assert book.take(part) is EARLIER
            assert book.take(part) is REPEATED
        assert book.take(step(4, {0: (15, 1)})) is NEW
        assert (book.lengths, book.newest_steps) == ((16, 1, 0, 0), (4, 3, 0, 0))

    def test_not_all_need_to_come_again(self) -> None:
        book = book_of(step(1, {0: (0, 5)}), step(2, {0: (5, 5)}))
        book.begin_epoch()
        assert book.take(step(2, {0: (5, 5)})) is EARLIER
        with pytest.raises(ProtocolError, match="after step 2"):
            book.take(step(1, {0: (0, 5)}))
        book.begin_epoch()
        assert book.take(step(3, {0: (10, 1)})) is NEW

    @pytest.mark.parametrize(
        "wrong",
        [
            step(2, {0: (5, 1)}),
            step(2, {0: (4, 2)}),
            step(2, {0: (5, 2), 1: (0, 1)}),
            step(1, {0: (0, 9)}),
        ],
        ids=["fewer", "earlier", "more sequences", "longer than held"],
    )
    def test_what_differs_is_no_repeat(self, wrong: Step) -> None:
        book = book_of(step(1, {0: (0, 5)}), step(2, {0: (5, 2)}))
        book.begin_epoch()
        with pytest.raises(ProtocolError, match="came after step 2"):
            book.take(wrong)
        assert book.take(step(2, {0: (5, 2)})) is EARLIER

    def test_operations_are_not_done_again(self) -> None:
        moves = Operations(truncates=((0, 3),), releases=(3,))
        book = book_of(step(1, {0: (0, 5)}), step(2, {0: (3, 1)}, moves))
        book.begin_epoch()
        assert book.take(step(2, {0: (3, 1)}, moves)) is EARLIER
        assert book.lengths == (4, 0, 0, 0)


class TestReplays:
    def test_positions_only(self) -> None:
        book = SequenceBook(TERMS)
        assert book.take(replay(90, {0: (0, 5), 1: (0, 3)})) is NEW
        assert book.take(replay(89, {0: (5, 2)})) is NEW
        assert (book.lengths, book.newest_steps) == ((7, 3, 0, 0), (4, 4, 0, 0))
        # A pending step has a lower number than the replay.
        assert book.take(step(5, {0: (7, 1), 1: (3, 1)})) is NEW

    def test_repeats(self) -> None:
        book = SequenceBook(TERMS)
        assert book.take(replay(9, {0: (0, 5)})) is NEW
        assert book.take(replay(9, {0: (0, 5)})) is REPEATED
        with pytest.raises(ProtocolError, match="which holds 5"):
            book.take(replay(9, {0: (0, 4)}))

    @pytest.mark.parametrize(
        ("message", "error"),
        [
            (replay(9, {0: (1, 5)}), ProtocolError),
            (replay(9, {0: (0, 51)}), RequestError),
            (replay(9, {4: (0, 1)}), RequestError),
            (replay(9, {0: (0, 1)}, operations=Operations(releases=(0,))), RequestError),
        ],
    )
    def test_refused(self, message: Step, error: type[BloomBeeError]) -> None:
        book = SequenceBook(TERMS)
        with pytest.raises(error):
            book.take(message)
        assert (book.lengths, book.newest_steps, book.included) == ((0,) * 4, (0,) * 4, ())

    def test_included_operations_are_skipped_once(self) -> None:
        moves = Operations(forks=((1, 0),), truncates=((1, 2),), releases=(3,))
        pending = step(6, {1: (2, 1)}, moves)
        book = SequenceBook(TERMS)
        gone = Operations(releases=(3,))
        book.take(replay(9, {0: (0, 5), 1: (0, 2)}, included=(6,), operations=gone))
        assert book.included == (6,)
        assert book.operations(pending) == NO_OPERATIONS
        assert book.take(pending) is NEW
        assert (book.lengths, book.included) == ((5, 3, 0, 0), ())
        # The step touched what its operations name, done here or before.
        assert book.newest_steps == (6, 6, 0, 6)
        assert book.operations(step(7, {1: (3, 1)}, moves)) == moves


class TestMoving:
    def test_a_restored_book_goes_on_as_the_first_would(self) -> None:
        first = book_of(step(1, {0: (0, 5)}, Operations(releases=(3,))), step(2, {1: (0, 2)}))
        first.take(replay(9, {2: (0, 4)}, as_of=2, included=(7,)))
        book = SequenceBook(TERMS)
        book.restore(first.export())
        assert book.export() == first.export()
        assert book.take(step(2, {1: (0, 2)})) is EARLIER
        assert book.take(step(7, {2: (4, 1)}, Operations(forks=((1, 0),)))) is NEW
        assert book.lengths == (5, 2, 5, 0)
        with pytest.raises(RequestError, match="released"):
            book.take(step(8, {3: (0, 1)}))

    def test_the_state_of_another_session_is_refused(self) -> None:
        small = SequenceBook(Terms(epoch=3, span=Span(2, 8), sequences=2, max_length=50))
        long = SequenceBook(Terms(epoch=3, span=Span(2, 8), sequences=4, max_length=500))
        long.take(step(1, {0: (0, 51)}))
        for other in (small, long):
            with pytest.raises(ProtocolError, match="another session"):
                SequenceBook(TERMS).restore(other.export())
