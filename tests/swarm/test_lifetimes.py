"""Who is still there: beats, links to next stages, leases, deadlines, and bugs of our own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from bloombee.core import SessionId
from bloombee.errors import DeadlineExceeded, HopLost, RequestError
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import Attach, Attached, Beat, Close, Failed, Open, Opened
from bloombee.server.leases import ORPHAN_S
from tests.swarm.harness import RawSession, Swarm, counting_stage, eventually, expect, kv_freed, run
from tests.swarm.recovering import KV_TOKENS, MAX_LENGTH, SEQUENCES, Talk, digest_stage, model_of

if TYPE_CHECKING:
    from collections.abc import Callable

TAKEN = SEQUENCES * MAX_LENGTH
PROMPTS = {0: [5, 7, 11], 1: [3, 1], 2: [8, 8, 8, 2]}


def clock() -> Callable[[], float]:
    return asyncio.get_running_loop().time


class TestBeats:
    def test_a_stage_answers_at_once_with_its_newest_step_sent(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            for number, steps in enumerate((0, 1, 2), start=1):
                for index, link in enumerate(talk.links):
                    await link.send(Beat(talk.session.id, number))
                    heard = await expect(link, Beat)
                    assert (heard.number, heard.sent_step) == (number, steps), index
                await talk.step({0: [number]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_a_step_that_is_not_sent_on_does_not_count_and_holds_up_no_beat(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            model_of(setups[0]).gate.clear()
            sent = await talk.send({0: [4]})
            for link in talk.links:
                await link.send(Beat(talk.session.id, 7))
                assert (await expect(link, Beat)).sent_step == 1
            model_of(setups[0]).gate.set()
            await talk.check(sent)
            await talk.move(s.route())
            for link in talk.links:
                await link.send(Beat(talk.session.id, 8))
                assert (await expect(link, Beat)).sent_step == 0

        setups = [digest_stage(0, 3), digest_stage(3, 6)]
        run(*setups, test=test)

    def test_also_while_a_session_is_being_opened_and_after_a_refusal(self) -> None:
        async def test(s: Swarm) -> None:
            await s.client().open(s.route(), sequences=1, max_length=500)
            waiting = await s.client().connect(s.stages[0])
            opening = Open(b"q" * 16, bytes(16), 0, "tiny", 0, 4, 2, 400, "float32", wait_s=0.4)
            await waiting.send(opening)
            await waiting.send(Beat(b"q" * 16, 1))
            assert (await expect(waiting, Beat)).number == 1
            failed = await expect(waiting, Failed)
            assert failed.code == "kv-full"
            await waiting.send(Beat(b"q" * 16, 2))
            assert (await expect(waiting, Beat)).number == 2
            await waiting.send(msgspec.structs.replace(opening, sequences=1))
            await expect(waiting, Opened)

        run(counting_stage(), test=test)

    def test_a_stage_that_waits_for_room_in_its_queue_says_that_it_lives(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloombee.server.window.MESSAGES", 2)
        monkeypatch.setattr("bloombee.server.window.BEAT_S", 0.05)

        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            model_of(setups[0]).gate.clear()
            sent = [await talk.send({0: [number]}) for number in range(3)]
            for _ in range(3):
                await expect(talk.links[0], Beat)
            model_of(setups[0]).gate.set()
            for each in sent:
                await talk.check(each)

        setups = [digest_stage(0, 6)]
        run(*setups, test=test)


class TestLinks:
    def test_a_session_opens_before_its_link_stands_and_results_wait(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            links = [await client.connect(stage) for stage in s.stages]
            session = RawSession(SessionId(b"x" * 16), b"s" * 16, links, [])
            talk = Talk(client, s.route(), session)
            await talk.links[0].send(talk.opening(0))
            await expect(talk.links[0], Opened)
            sent = [await talk.send(PROMPTS), await talk.send({0: [4]})]
            await asyncio.sleep(0.1)
            await talk.links[1].send(talk.opening(1))
            await expect(talk.links[1], Opened)
            await talk.check(*sent)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_a_silent_next_stage_is_told_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bloombee.server.downstream.SILENCE_S", 0.4)
        monkeypatch.setattr("bloombee.server.downstream.BEAT_S", 0.1)

        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await asyncio.sleep(1.0)  # it is not silent
            await talk.step({0: [3]})
            s.network.partition([s.stages[0].endpoint.peer], [s.stages[1].endpoint.peer])
            cut_s = clock()()
            failed = await expect(talk.links[0], Failed)
            assert (failed.code, failed.step, failed.epoch) == ("hop-lost", 0, 0)
            assert "no sign of life" in failed.message
            assert s.stages[1].endpoint.address in failed.message
            assert 0.2 < clock()() - cut_s < 2.0
            # Each step that can't go on is answered; what it came to is kept.
            pending = await talk.send({0: [4]})
            with pytest.raises(HopLost):
                raise to_error(await expect(talk.links[0], Failed))
            s.network.heal()
            await talk.move(s.route())
            await talk.again(pending)
            await talk.check(pending)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_a_stage_drops_the_silent_stage_before_it_and_keeps_the_session(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloombee.server.hop_stream.SILENCE_S", 0.2)

        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route())
            upstream = await s.client().connect(s.stages[0])
            await upstream.send(Attach(session.id, session.secret, 0))
            await expect(upstream, Attached)
            await upstream.send(Beat(session.id, 3))
            assert (await expect(upstream, Beat)).number == 3
            (held,) = s.stages[0].sessions
            assert held.upstream is not None
            assert await upstream.receive(5.0) is None
            assert held.upstream is None
            assert [len(stage.sessions) for stage in s.stages] == [1]

        run(counting_stage(), test=test)

    def test_a_stage_before_that_leaves_waits_no_longer_for_a_session(self) -> None:
        async def test(s: Swarm) -> None:
            link = await s.client().connect(s.stages[0])
            await link.send(Attach(b"n" * 16, bytes(16), 0))
            await asyncio.sleep(0.05)
            await link.close()

            async def gone() -> bool:
                return not s.network._listeners[s.stages[0].endpoint.address].handlers

            await eventually(gone, "the handler has ended")

        run(counting_stage(), test=test)


class TestLeases:
    def test_a_client_that_vanished_frees_all_within_a_second(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            start_s = clock()()
            s.network.kill(talk.client.identity.peer_id)
            await asyncio.sleep(ORPHAN_S / 2)
            assert await s.free_tokens() == [KV_TOKENS - TAKEN] * 2
            await kv_freed(s, KV_TOKENS, KV_TOKENS)
            assert clock()() - start_s < 1.0 + 0.5  # a busy machine
            assert [len(stage.sessions) for stage in s.stages] == [0, 0]
            assert [len(stage._tasks) for stage in s.stages] == [1, 1]

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_one_that_comes_back_in_time_goes_on(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await talk.session.vanish()
            await asyncio.sleep(ORPHAN_S / 2)
            await talk.move(s.route(), redial=[0, 1])
            await asyncio.sleep(ORPHAN_S * 1.5)
            await talk.step({0: [4], 1: [5], 2: [6]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_a_silent_client_keeps_its_session_until_its_lease_ends(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            for number in range(8):
                await asyncio.sleep(0.15)
                await talk.links[0].send(Beat(talk.session.id, number))
            # The second stage has heard nothing for longer than its lease.
            await kv_freed(s, KV_TOKENS - TAKEN, KV_TOKENS)
            while (received := await talk.links[1].receive(5.0)) is not None:
                assert isinstance(received[0], Failed)
            await kv_freed(s, KV_TOKENS, KV_TOKENS)

        run(digest_stage(0, 3, lease_s=0.5), digest_stage(3, 6, lease_s=0.5), test=test)

    @pytest.mark.parametrize("leave", ["close", "vanish"])
    def test_who_leaves_while_it_queues_gets_nothing(self, leave: str) -> None:
        async def test(s: Swarm) -> None:
            first = await s.client().open(s.route(), sequences=1, max_length=500)
            link = await s.client().connect(s.stages[0])
            await link.send(
                Open(b"q" * 16, bytes(16), 0, "tiny", 0, 4, 2, 400, "float32", wait_s=9)
            )
            await asyncio.sleep(0.05)
            assert len(s.stages[0].sessions) == 2
            if leave == "close":
                await link.send(Close(b"q" * 16))
                while (received := await link.receive(5.0)) is not None:
                    assert not isinstance(received[0], Opened)
            else:
                await link.close()

            async def gone() -> bool:
                return len(s.stages[0].sessions) == 1

            await eventually(gone, "the session that waited is gone")
            await first.close()
            assert await s.free_tokens() == [1000]

        run(counting_stage(), test=test)

    def test_a_session_that_ends_while_its_next_epoch_opens(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            model_of(setups[0]).gate.clear()
            await talk.send({0: [4]})
            await talk.begin_move(s.route())
            await talk.session.vanish()
            await asyncio.sleep(ORPHAN_S + 0.3)
            assert [len(stage.sessions) for stage in s.stages] == [0]
            model_of(setups[0]).gate.set()
            await kv_freed(s, KV_TOKENS)

        setups = [digest_stage(0, 6)]
        run(*setups, test=test)


class TestDeadlines:
    def test_a_step_whose_time_is_up_while_it_waits_is_dropped(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            late = await talk.send({0: [4]}, deadline_ms=30)
            with pytest.raises(DeadlineExceeded, match="step 2 .* 30 ms"):
                raise to_error(await expect(talk.links[0], Failed))
            assert s.stages[0].telemetry.snapshot()["steps"] == 1
            late.message = msgspec.structs.replace(late.message, deadline_ms=0)
            await talk.move(s.route())
            await talk.again(late)
            await talk.check(late)

        # One message a second: the second step has to wait for its turn.
        run(digest_stage(0, 3, max_messages_per_s=2), digest_stage(3, 6), test=test)

    def test_one_computed_too_late_is_kept_but_not_sent_on(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            model_of(setups[0]).gate.clear()
            late = await talk.send({0: [4]}, deadline_ms=50)
            await asyncio.sleep(0.1)
            model_of(setups[0]).gate.set()
            with pytest.raises(DeadlineExceeded):
                raise to_error(await expect(talk.links[0], Failed))
            late.message = msgspec.structs.replace(late.message, deadline_ms=0)
            first, second = await talk.move(s.route())
            assert (first.newest_steps[0], second.newest_steps[0]) == (2, 1)
            await talk.again(late)
            await talk.check(late)

        setups = [digest_stage(0, 3), digest_stage(3, 6)]
        run(*setups, test=test)

    def test_what_is_left_of_the_time_goes_along(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            model_of(setups[1]).gate.clear()
            sent = await talk.send(PROMPTS, deadline_ms=60_000)

            async def taken() -> bool:
                return s.stages[1].telemetry.snapshot()["steps"] == 1

            await eventually(taken, "the second stage has the step")
            (held,) = s.stages[1].sessions
            last = held.held.book._last[0]
            assert last is not None and 30_000 < last.deadline_ms < 60_000
            model_of(setups[1]).gate.set()
            await talk.check(sent)

        setups = [digest_stage(0, 3), digest_stage(3, 6)]
        run(*setups, test=test)


def test_a_bug_in_a_background_task_is_handed_to_who_runs_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("bloombee.server.sending.Sending.run", broken)

    async def test(s: Swarm) -> None:
        await s.client().open(s.route())
        async with asyncio.timeout(5):
            assert isinstance(await s.stages[0].failed(), ZeroDivisionError)

    run(counting_stage(), test=test)


def test_a_stream_has_one_session() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route())
        await session.links[0].send(Open(b"o" * 16, bytes(16), 0, "tiny", 0, 4, 1, 9, "float32"))
        with pytest.raises(RequestError, match="open another stream"):
            await expect(session.links[0], Opened)

    run(counting_stage(), test=test)
