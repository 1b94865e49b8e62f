"""Small parts of sessions: leases, pulses, kept outputs, holdings, background tasks."""

from __future__ import annotations

import asyncio

import pytest
import torch

from bloombee.core import PackedTable, Span
from bloombee.errors import ProtocolError, StepFailed
from bloombee.protocol.pulse import SLOWEST_BYTES_PER_S, Pulse
from bloombee.server.holdings import Entered, Holdings, Outputs
from bloombee.server.leases import ORPHAN_S, Lease
from bloombee.server.tasks import BackgroundTasks
from bloombee.server.validation import NO_OPERATIONS, StepContext, Terms
from bloombee.server.work import Outcome
from tests.unit.test_sessions_validation import step

CONTEXT = StepContext(Terms(3, Span(2, 8), 2, 50), hidden_size=4, max_step_tokens=32)


class TestLease:
    def test_it_runs_from_the_last_word(self) -> None:
        lease = Lease(30.0, 100.0)
        assert not lease.is_over(129.9)
        assert lease.is_over(130.0)
        lease.heard_s = 120.0
        assert not lease.is_over(149.9)

    def test_an_orphan_has_a_moment(self) -> None:
        lease = Lease(30.0, 100.0)
        lease.orphaned(110.0)
        assert not lease.is_over(110.0 + ORPHAN_S - 0.01)
        assert lease.is_over(110.0 + ORPHAN_S)
        lease.adopted()
        assert not lease.is_over(129.0)


class TestPulse:
    def test_silence_on_an_idle_link(self) -> None:
        pulse = Pulse(4.0, 10.0)
        assert pulse.lost_at_s(0) == 14.0
        pulse.heard(12.0, pulse.beat(0))
        assert pulse.lost_at_s(0) == 16.0

    def test_bytes_under_way_take_their_time(self) -> None:
        pulse = Pulse(4.0, 10.0)
        sent = 5 * SLOWEST_BYTES_PER_S
        assert pulse.lost_at_s(sent) == 19.0
        first = pulse.beat(sent)
        second = pulse.beat(sent + SLOWEST_BYTES_PER_S)
        pulse.heard(11.0, first)
        assert pulse.lost_at_s(sent + SLOWEST_BYTES_PER_S) == 16.0
        pulse.heard(12.0)
        assert pulse.lost_at_s(sent + SLOWEST_BYTES_PER_S) == 17.0
        pulse.heard(13.0, second)
        assert pulse.lost_at_s(sent + SLOWEST_BYTES_PER_S) == 17.0


class TestOutputs:
    def test_kept_until_answered(self) -> None:
        outputs = Outputs()
        for number in (1, 2, 3):
            outputs.keep(number, torch.full((2, 4), float(number)))
        outputs.answered(2)
        outputs.answered(1)
        outputs.keep(2, torch.zeros(2, 4))
        assert list(outputs.kept) == [3]
        assert outputs.held_bytes == 2 * 4 * 4

    def test_the_oldest_go_when_nobody_answers(self) -> None:
        outputs = Outputs(limit_bytes=100)
        for number in range(1, 10):
            outputs.keep(number, torch.zeros(3, 4))
        assert list(outputs.kept) == [8, 9]
        outputs.keep(10, torch.zeros(100, 4))
        assert list(outputs.kept) == [10]

    def test_a_row_of_a_merged_pass_does_not_keep_all_of_it(self) -> None:
        outputs = Outputs()
        outputs.keep(1, torch.zeros(100, 4)[7:8])
        assert outputs.kept[1].untyped_storage().nbytes() == 16


class TestHoldings:
    TABLE = PackedTable((0,), (0,), (3,))

    def test_quiet_once_all_is_computed(self) -> None:
        async def main() -> None:
            held = Holdings(CONTEXT, "float32", is_last=False)
            entered = Entered(step(1, {0: (0, 3)}), self.TABLE, NO_OPERATIONS)
            held.began(entered)
            async with asyncio.TaskGroup() as group:
                quiet = group.create_task(held.quiet())
                await asyncio.sleep(0)
                assert not quiet.done()
                rows = Outcome(torch.ones(3, 4), compute_us=500)
                held.computed(entered, rows)
            assert held.journal is not None
            assert held.journal.lengths == (3, 0)

        asyncio.run(main())

    def test_a_failed_step_breaks_them(self) -> None:
        held = Holdings(CONTEXT, "float32", is_last=False)
        entered = Entered(step(1, {0: (0, 3)}), self.TABLE, NO_OPERATIONS)
        held.began(entered)
        held.computed(entered, Outcome(None, StepFailed("bad luck")))
        assert held.broken == "step 1 failed (bad luck)"

    def test_so_does_a_gap_in_the_journal_and_an_output_that_is_gone(self) -> None:
        held = Holdings(CONTEXT, "float32", is_last=False)
        late = Entered(step(2, {0: (1, 2)}), PackedTable((0,), (1,), (2,)), NO_OPERATIONS)
        held.began(late)
        held.computed(late, Outcome(torch.ones(2, 4)))
        assert "a step starts at 1" in held.broken
        last = Holdings(CONTEXT, "float32", is_last=True)
        with pytest.raises(StepFailed, match="step 1 is not held"):
            last.again(step(1, {0: (0, 3)}), self.TABLE)
        assert last.broken

    @pytest.mark.parametrize("is_last", [False, True])
    def test_they_can_move(self, is_last: bool) -> None:
        held = Holdings(CONTEXT, "float32", is_last=is_last)
        message, rows = step(1, {0: (0, 3)}), torch.arange(12.0).view(3, 4)
        held.book.take(message)
        entered = Entered(message, self.TABLE, NO_OPERATIONS)
        held.began(entered)
        held.computed(entered, Outcome(rows))
        moved = Holdings(CONTEXT, "float32", is_last=is_last)
        moved.restore(held.carry())
        assert moved.book.export() == held.book.export()
        again = moved.again(message, self.TABLE).outcome.rows
        assert again is not None and torch.equal(again, rows)
        other = Holdings(CONTEXT, "float32", is_last=not is_last)
        with pytest.raises(ProtocolError, match="place in the route"):
            other.restore(held.carry())

    def test_how_long_a_replay_takes(self) -> None:
        held = Holdings(CONTEXT, "float32", is_last=True)
        assert held.replay_s == 0.0
        prompt = step(1, {0: (0, 3)}, phase="prefill")
        word = step(2, {0: (3, 1)}, phase="decode")
        for message, us in ((prompt, 300_000), (word, 900_000)):
            held.book.take(message)
            entered = Entered(message, self.TABLE, NO_OPERATIONS)
            held.began(entered)
            held.computed(entered, Outcome(torch.zeros(1, 4), compute_us=us))
        assert held.replay_s == pytest.approx(0.4)


class TestBackgroundTasks:
    def test_stop_leaves_none(self) -> None:
        async def main() -> None:
            tasks = BackgroundTasks()
            running = [tasks.start(asyncio.sleep(60), "sleep") for _ in range(3)]
            await asyncio.sleep(0)
            await tasks.stop()
            assert all(task.cancelled() for task in running)
            assert len(tasks) == 0
            assert (late := tasks.start(asyncio.sleep(60), "late"))
            await asyncio.wait([late], timeout=5)
            assert late.cancelled()

        asyncio.run(main())

    def test_the_first_bug_is_told(self) -> None:
        async def broken(error: Exception) -> None:
            raise error

        async def main() -> None:
            tasks = BackgroundTasks()
            async with asyncio.timeout(5), asyncio.TaskGroup() as group:
                waiting = group.create_task(tasks.failed())
                tasks.start(broken(KeyError("first")), "first")
                await asyncio.sleep(0.01)
                tasks.start(broken(ValueError("second")), "second")
            assert isinstance(waiting.result(), KeyError)
            assert isinstance(await tasks.failed(), KeyError)

        asyncio.run(main())
