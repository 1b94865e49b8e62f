"""What a loop does when its client is slow, is gone, goes on to something else, or is too late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bloombee.protocol.messages import Failed, Operations
from bloombee.server.mail import Mail
from bloombee.transport.interface import TransportLimits
from bloombee.transport.memory import MemoryNetwork
from tests.swarm.harness import Swarm, eventually, run, swarm
from tests.swarm.looping import GREEDY, ROUTES, SAMPLED, LoopTalk, stages
from tests.swarm.recovering import KV_TOKENS, PROMPTS, digest_stage, model_of, steps_computed

if TYPE_CHECKING:
    import pytest


class TestSlowClient:
    def test_it_does_not_hold_the_loop(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLED)

            async def looped() -> bool:
                return steps_computed(s) == [12, 12]

            await eventually(looped, "the loop is over, and nothing was read")
            assert not talk.is_over
            await talk.finish()

        asyncio.run(asyncio.wait_for(_over_narrow_streams(test), 60))

    def test_until_it_is_far_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bloombee.server.sessions.Mail", lambda: Mail(messages=3))

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLED)
            await asyncio.sleep(0.3)
            held = steps_computed(s)
            assert 3 < held[1] < 12 and held[0] <= held[1] + 1
            await talk.finish()

        asyncio.run(asyncio.wait_for(_over_narrow_streams(test), 60))


async def _over_narrow_streams(test: Any) -> None:
    network = MemoryNetwork(limits=TransportLimits(queue_bytes=64))
    async with swarm(stages(2), network) as s:
        await test(s)


class TestEnds:
    def test_a_client_that_is_gone(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, GREEDY)
            await talk.hear(2)
            for setup in setups:
                model_of(setup).gate.clear()
            await talk.session.vanish()

            async def gone() -> bool:
                return all(not len(stage.sessions) for stage in s.stages)

            await eventually(gone, "no session is left")
            for setup in setups:
                model_of(setup).gate.set()
            assert await s.free_tokens() == [KV_TOKENS] * 3
            computed = steps_computed(s)
            await asyncio.sleep(0.1)
            assert steps_computed(s) == computed

        setups = stages(3)
        run(*setups, test=test)

    def test_a_client_that_is_silent(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            model_of(setups[1]).gate.clear()
            await talk.start(PROMPTS, GREEDY)

            async def gone() -> bool:
                return all(not len(stage.sessions) for stage in s.stages)

            await eventually(gone, "its leases are over")
            model_of(setups[1]).gate.set()
            assert await s.free_tokens() == [KV_TOKENS] * 2
            assert steps_computed(s) == [1, 1]

        setups = [digest_stage(*span, lease_s=0.3) for span in ROUTES[2]]
        run(*setups, test=test)

    def test_its_time_is_up(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, GREEDY, deadline_ms=300)
            await talk.hear(2)
            model_of(setups[0]).gate.clear()
            await asyncio.sleep(0.4)
            model_of(setups[0]).gate.set()
            failure: Failed | None = None
            while failure is None:
                received = await talk.session._first_word()  # noqa: SLF001 - a test's own
                if isinstance(received[0], Failed):
                    failure = received[0]
            assert failure.code == "deadline" and failure.step > 2
            computed = steps_computed(s)
            await asyncio.sleep(0.1)
            assert steps_computed(s) == computed

        setups = stages(2)
        run(*setups, test=test)

    def test_a_later_epoch_ends_it(self) -> None:
        """Cancelled: nothing of the old epoch goes on; the next step cuts what ran ahead."""

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLED)
            await talk.hear(3)
            await talk.move(s.route())
            computed = steps_computed(s)
            await asyncio.sleep(0.1)
            assert steps_computed(s) == computed
            cut = Operations(truncates=tuple((q, 0) for q in PROMPTS))
            other = {0: [4, 4], 1: [9], 2: [7, 7]}
            await talk.start(other, GREEDY, operations=cut)
            await talk.finish()
            await talk.session.close()
            assert await s.free_tokens() == [KV_TOKENS] * 3

        run(*stages(3), test=test)
