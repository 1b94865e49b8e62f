"""Pending and answered steps, and which rows rebuild a stage: against a plain account."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bloombee.client.history import History
from bloombee.client.ledger import NO_OPERATIONS, Ledger, PendingStep, Standing
from bloombee.client.rebuild import Gap, Rows, gaps, rows_of_client, rows_of_stage
from bloombee.client.split import Part
from bloombee.core import PackedTable
from bloombee.protocol.messages import Operations, Output, Payload

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYLOAD = Payload("rows", "float32", 1, 4)


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """Answers are futures of a running loop."""
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        asyncio._set_running_loop(runner.get_loop())
        yield
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)


def enter(
    ledger: Ledger,
    table: dict[int, tuple[int, int]],
    operations: Operations = NO_OPERATIONS,
) -> PendingStep:
    """A step over sequence -> (first position, count)."""
    packed = PackedTable(
        tuple(table), tuple(f for f, _ in table.values()), tuple(c for _, c in table.values())
    )
    part = Part(0, packed.tokens, packed, "last", len(table))
    step = PendingStep(ledger.number(), part, operations, "decode", PAYLOAD, b"x")
    ledger.enter(step)
    return step


def answer(ledger: Ledger, number: int) -> None:
    output = Output(bytes(16), 0, number, PAYLOAD)
    assert ledger.take(output, memoryview(b"")) is not None


def test_a_step_is_pending_until_it_is_answered() -> None:
    ledger = Ledger(3)
    steps = [enter(ledger, {0: (0, 4)}), enter(ledger, {0: (4, 4), 1: (0, 2)})]
    assert [step.number for step in ledger] == [1, 2]
    assert ledger.answered == 0
    answer(ledger, 1)
    assert (ledger.answered, ledger.oldest) == (1, steps[1])
    assert ledger.newest == [1, 0, 0]
    answer(ledger, 2)
    assert not ledger
    assert (ledger.answered, ledger.newest) == (2, [2, 2, 0])
    assert steps[1].answer.result()[0].step == 2
    assert ledger.take(Output(bytes(16), 0, 2, PAYLOAD), memoryview(b"")) is None


def test_operations_touch_what_they_change() -> None:
    ledger = Ledger(6)
    enter(
        ledger,
        {0: (3, 1)},
        Operations(forks=((1, 0), (2, 5)), truncates=((3, 2),), releases=(4,)),
    )
    answer(ledger, 1)
    assert ledger.newest == [1, 1, 1, 1, 1, 0]


def test_a_new_epoch_sends_everything_again_with_what_is_true_then() -> None:
    ledger = Ledger(1)
    step = enter(ledger, {0: (0, 1)})
    step.sent = True
    ledger.unsent()
    assert not step.sent
    message = step.message(Standing(bytes(16), 7, 250), ledger.answered)
    assert (message.epoch, message.step, message.answered, message.deadline_ms) == (7, 1, 0, 250)


def test_a_stage_is_current_when_it_has_what_was_answered() -> None:
    ledger = Ledger(3)
    enter(ledger, {0: (0, 2), 1: (0, 2)})
    answer(ledger, 1)
    enter(ledger, {1: (2, 1)})
    answer(ledger, 2)
    enter(ledger, {0: (2, 1)})  # not answered: a stage may have it or not
    lengths = [3, 3, 0]
    assert ledger.is_current((1, 2, 0), lengths)
    assert ledger.is_current((3, 2, 0), lengths)
    assert not ledger.is_current((1, 1, 0), lengths)
    assert not ledger.is_current((0, 0, 0), lengths)
    assert ledger.is_current((0, 0, 0), [0, 0, 0]), "nothing can be missing of nothing"
    ledger.rebase(range(3))
    assert not ledger.is_current((3, 3, 3), lengths)


def test_steps_that_are_given_up_are_handed_back() -> None:
    ledger = Ledger(1)
    steps = [enter(ledger, {0: (0, 1)}), enter(ledger, {0: (1, 1)})]
    assert ledger.withdraw() == steps
    assert not ledger
    assert all(step.answer.cancelled() for step in steps)


def test_replays_are_numbered_with_the_steps_and_answered_apart() -> None:
    ledger = Ledger(1)
    enter(ledger, {0: (0, 1)})
    number, done = ledger.expect_replay()
    assert number == 2
    assert ledger.expects(number)
    assert ledger.answered == 0
    assert ledger.take_replay(number)
    assert done.done()
    assert not ledger.take_replay(number)
    assert not ledger.expects(number)


# What rebuilds a stage -------------------------------------------------------------------------


def test_gaps_are_runs_of_empty_stages() -> None:
    assert gaps([False, False]) == []
    assert gaps([True, True, False, True]) == [Gap(0, 1), Gap(3, 3)]
    assert gaps([True])[0].stages == 1


def test_a_stage_replays_what_it_holds() -> None:
    assert rows_of_stage((5, 0, 3), (2, 0, 2), []) == Rows((5, 0, 3), ())


def test_steps_without_an_answer_come_again_by_themselves() -> None:
    """Sequence 0 grew by both parts, 1 by the second; the stage has taken only the first."""
    ledger = Ledger(3)
    operations = Operations(truncates=((0, 6),))
    enter(ledger, {0: (6, 4)}, operations)
    enter(ledger, {0: (10, 2), 1: (3, 5)})
    both = rows_of_stage((12, 8, 2), (2, 2, 0), ledger)
    assert both == Rows((6, 3, 2), (1,))
    first_only = rows_of_stage((10, 3, 2), (1, 0, 0), ledger)
    assert first_only == Rows((6, 3, 2), (1,))
    none = rows_of_stage((9, 3, 2), (0, 0, 0), ledger)
    assert none == Rows((9, 3, 2), ())
    assert rows_of_client([12, 8, 2], ledger) == both


def test_rows_are_cut_to_parts_that_cover_them_in_order() -> None:
    rows = Rows((300, 0, 20), ())
    covered: dict[int, int] = {0: 0, 2: 0}
    for part in rows.parts(2, 16, 128):
        assert part.table.tokens <= 128
        assert part.wants == "none"
        for row in part.table.rows():
            assert row.first_position == covered[row.sequence]
            covered[row.sequence] += row.count
    assert covered == {0: 300, 2: 20}
    assert not list(Rows((0, 0), ()).parts(1, 16, 128))


def test_whole_parts_begin_where_the_steps_did() -> None:
    starts = [[0, 5, 6, 7], [0, 4], []]
    parts = list(Rows((7, 6, 0), ()).whole_parts(starts, 8))
    found = [
        [(row.sequence, row.first_position, row.count) for row in part.table.rows()]
        for part in parts
    ]
    assert found == [[(0, 0, 5)], [(1, 0, 4)], [(0, 5, 1), (1, 4, 2)], [(0, 6, 1)]]


def test_the_history_knows_where_steps_began() -> None:
    history = History(3, keep_starts=True)
    history.append(PackedTable((0, 1), (0, 0), (3, 2)), [1, 2, 3, 4, 5])
    history.append(PackedTable((0,), (3,), (1,)), [6])
    history.apply(Operations(forks=((2, 0),), truncates=((0, 3), (2, 2))))
    assert [list(history.starts(s)) for s in range(3)] == [[0], [0], [0]]
    history.append(PackedTable((2,), (2,), (2,)), [7, 8])
    assert history.starts(2) == [0, 2]
    assert history.entries(2) == [1, 2, 7, 8]
    history.cut(2, 2)
    assert history.starts(2) == [0]
    assert History(1).starts(0) == (0,)


def test_what_a_stage_has_not_applied_frees_nothing_yet() -> None:
    ledger = Ledger(3)
    enter(ledger, {0: (6, 1)}, Operations(releases=(2,)))
    assert rows_of_stage((6, 0, 4), (0, 0, 0), ledger, {1, 2}).released == (1,)
    assert rows_of_stage((7, 0, 0), (1, 0, 1), ledger, {1, 2}).released == (1, 2)
    assert rows_of_client([7, 0, 0], ledger, {1, 2}).released == (1, 2)


def test_a_loop_that_stages_have_overtaken_goes_on_under_a_new_number() -> None:
    ledger = Ledger(3)
    enter(ledger, {0: (0, 4), 2: (0, 2)})
    answer(ledger, 1)
    step = enter(ledger, {0: (4, 1), 2: (2, 1)})
    step.until = ledger.reserve(5)
    assert (step.number, step.until) == (2, 7)
    assert ledger.overtaken([(2, 9, 1), (1, 0, 2)]) == []  # the pending step itself; another row
    assert ledger.overtaken([(), (1, 0, 3)]) == [step]
    ledger.renumber(step)
    assert (step.number, step.until) == (8, 13)
    assert step.operations == Operations(truncates=((0, 4), (2, 2)))
    assert list(ledger) == [step]
    assert ledger.expects(13)
    assert not ledger.expects(2)
    assert ledger.overtaken([(7, 0, 7)]) == []
    answer(ledger, 8)
    assert ledger.newest == [8, 0, 8]


def test_only_loops_are_overtaken() -> None:
    ledger = Ledger(1)
    enter(ledger, {0: (0, 4)})
    enter(ledger, {0: (4, 4)})
    assert ledger.overtaken([(2,)]) == []
