"""Full servers and greedy peers, over raw protocol in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from bloombee.core import Span
from bloombee.errors import KVFull, ProtocolError, RequestError, TransportError
from bloombee.models import open_source
from bloombee.protocol.messages import Beat, Open, Operations
from bloombee.server.validation import Limits
from bloombee.transport.interface import TransportLimits
from bloombee.transport.memory import MemoryNetwork
from tests import virtual_time
from tests.inline_executor import InlineExecutor
from tests.swarm.harness import (
    RawClient,
    RawSession,
    StageSetup,
    Swarm,
    counting_rows,
    counting_stage,
    eventually,
    expect,
    stage_of,
    swarm,
)
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


def virtually(
    *stages: StageSetup,
    test: Callable[[Swarm], Awaitable[None]],
    network: MemoryNetwork | None = None,
) -> None:
    """Run `test` against these stages, in virtual time and on one thread."""

    async def main() -> None:
        inline = [replace(stage, make_executor=InlineExecutor) for stage in stages]
        async with swarm(inline, network) as s:
            await test(s)

    virtual_time.run(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def served(
    s: Swarm, client: RawClient, tokens: int, wait_s: float = 60.0, hold_s: float = 0.0
) -> float:
    """Open, hold for a while, close; when it was opened."""
    session = await client.open(s.route(), max_length=tokens, wait_s=wait_s)
    opened_s = now_s()
    await asyncio.sleep(hold_s)
    await session.close()
    return opened_s


class TestFullServer:
    def test_ten_waiting_clients_are_served_in_turn(self) -> None:
        """Each asks for all there is and keeps it for a second."""

        async def test(s: Swarm) -> None:
            first = await s.client().open(s.route(), max_length=100)
            async with asyncio.TaskGroup() as group:
                waiting = []
                for _ in range(10):
                    waiting.append(group.create_task(served(s, s.client(), 100, hold_s=1.0)))
                    await asyncio.sleep(0.1)
                description = await s.stages[0].describe()
                assert (description.waiting, description.free_tokens) == (10, 0)
                await first.close()
            times = [task.result() for task in waiting]
            assert times == pytest.approx([1.0 + turn for turn in range(10)], abs=0.1)
            assert await s.free_tokens() == [100]

        virtually(counting_stage(100), test=test)

    def test_a_greedy_peer_does_not_starve_another(self) -> None:
        """It has fifty requests queued; the other, who came last, is served second."""

        async def test(s: Swarm) -> None:
            greedy, modest = s.client(), s.client()
            first = await greedy.open(s.route(), max_length=100)
            async with asyncio.TaskGroup() as group:
                many = [
                    group.create_task(served(s, greedy, 60, hold_s=0.1, wait_s=1000))
                    for _ in range(50)
                ]
                await asyncio.sleep(1)
                one = group.create_task(served(s, modest, 60, hold_s=0.1, wait_s=1000))
                await asyncio.sleep(1)
                await first.close()
            order = sorted(task.result() for task in (*many, one))
            assert order.index(one.result()) == 1
            assert one.result() == pytest.approx(2.1, abs=0.05)

        limits = Limits(max_wait_s=1000)
        virtually(counting_stage(100, limits=limits), test=test)

    def test_the_error_says_what_was_free_asked_for_and_waited(self) -> None:
        async def test(s: Swarm) -> None:
            await s.client().open(s.route(), sequences=2, max_length=40)
            for wait_s in (0.0, 3.5):
                began_s = now_s()
                with pytest.raises(KVFull) as caught:
                    await s.client().open(s.route(), sequences=3, max_length=10, wait_s=wait_s)
                assert str(caught.value) == (
                    "20 tokens free, 30 asked for (3 sequences of 10), "
                    f"waited {wait_s} s; ask another server, or later"
                )
                assert now_s() - began_s == pytest.approx(wait_s, abs=0.05)
            with pytest.raises(KVFull, match=r"waited 4\.0 s"):
                await s.client().open(s.route(), max_length=30, wait_s=1000)
            with pytest.raises(RequestError, match=r"101 KV tokens .* this server has 100 in all"):
                await s.client().open(s.route(), max_length=101, wait_s=1000)

        virtually(counting_stage(100, limits=Limits(max_wait_s=4, park_bytes=0)), test=test)

    def test_a_client_that_vanishes_while_it_waits_leaves_no_trace(self) -> None:
        async def test(s: Swarm) -> None:
            stage = s.stages[0]
            first = await s.client().open(s.route(), max_length=100)
            link = await s.client().connect(stage)
            await link.send(
                Open(bytes(16), bytes(16), 0, "tiny", 0, 4, 1, 100, "float32", wait_s=60)
            )
            await asyncio.sleep(1)
            assert (stage.admission.waiting, len(stage.sessions)) == (1, 2)
            await link.close()
            await asyncio.sleep(1)
            assert (stage.admission.waiting, len(stage.sessions)) == (0, 1)
            await first.close()
            assert await served(s, s.client(), 100, wait_s=0) == pytest.approx(2, abs=0.1)
            assert await s.free_tokens() == [100]

        virtually(counting_stage(100), test=test)


class TestLimitsOfAPeer:
    def test_tokens(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            held = await client.open(s.route(), max_length=40)
            with pytest.raises(KVFull, match="10 tokens left of the 50 .*, 20 asked for"):
                await client.open(s.route(), max_length=20)
            with pytest.raises(RequestError, match="a peer may hold 50"):
                await client.open(s.route(), max_length=60)
            await s.client().open(s.route(), max_length=50)
            await held.close()
            await client.open(s.route(), max_length=50)

        virtually(counting_stage(100, limits=Limits(max_tokens_per_peer=50)), test=test)

    def test_sessions_that_wait_count(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            await client.open(s.route(), max_length=100)
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(served(s, client, 10))
                await asyncio.sleep(0.1)
                with pytest.raises(KVFull, match="a peer may hold 2 sessions"):
                    await client.open(s.route(), max_length=10)
                waiting.cancel()

        virtually(counting_stage(100, limits=Limits(max_sessions_per_peer=2)), test=test)

    def test_messages_are_read_no_faster_than_allowed(self) -> None:
        """What a flooding peer sends beyond that waits with it, and others are served."""

        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(), max_length=10)
            link = session.links[0]
            sent = answered = 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    sent += 1
                    await link.send(Beat(session.id, sent))

            async def count() -> None:
                nonlocal answered
                while True:
                    answered = (await expect(link, Beat)).number

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(flood()), group.create_task(count())]
                await asyncio.sleep(10)
                began_s = now_s()
                await served(s, s.client(), 10, wait_s=0)
                assert now_s() - began_s < 0.1
                for task in tasks:
                    task.cancel()
            assert answered == pytest.approx(20 * 10 + 20, abs=5)
            assert sent - answered < 4096 / 20

        network = MemoryNetwork(limits=TransportLimits(queue_bytes=4096))
        limits = Limits(max_messages_per_s=20)
        virtually(counting_stage(100, limits=limits), test=test, network=network)

    def test_steps_that_come_too_fast_wait(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(), max_length=90)

            async def flood() -> None:
                for position in range(80):
                    step = session.message(counting_rows(1), {0: (position, 1)})
                    await session.send(step, counting_rows(1))

            async with asyncio.TaskGroup() as group:
                group.create_task(flood())
                for _ in range(80):
                    await session.output()
            assert now_s() == pytest.approx((80 - 20) / 20, abs=0.2)

        limits = Limits(max_messages_per_s=20)
        virtually(counting_stage(100, limits=limits), test=test)

    @pytest.mark.parametrize("max_messages_per_s", [20, 100_000])
    def test_one_who_sends_and_never_listens_takes_bounded_memory(
        self, max_messages_per_s: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Steps that wait, that are refused, and repeats: each leaves an answer to be sent."""
        monkeypatch.setattr("bloombee.server.window.MESSAGES", 50)

        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(), max_length=90)
            held = next(iter(s.stages[0].sessions))
            sent = most = 0

            async def flood() -> None:
                nonlocal sent, most
                good = session.message(counting_rows(1), {0: (0, 1)})
                while True:
                    bad = session.message(counting_rows(1), {0: (70, 1)})
                    for step in (good, bad):
                        await session.send(step, counting_rows(1))
                        sent += 1
                        most = max(most, len(held.backlog) + held.outbox.qsize())

            async with asyncio.TaskGroup() as group:
                flooding = group.create_task(flood())
                await asyncio.sleep(30)
                flooding.cancel()
            assert 20 < most <= 50
            # Besides those, two buffers of 4,096 bytes are full, of steps and of answers.
            assert sent < 50 + 20 * 30 + 2 * 4096 / 30

        network = MemoryNetwork(limits=TransportLimits(queue_bytes=4096))
        limits = Limits(max_messages_per_s=max_messages_per_s)
        virtually(counting_stage(100, limits=limits), test=test, network=network)

    def test_a_frame_too_large_ends_its_stream_and_no_other(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            session = await client.open(s.route(), max_length=50)
            healthy = await s.client().open(s.route(), max_length=50)
            rows = counting_rows(1000)
            with pytest.raises((RequestError, ProtocolError, TransportError)):
                await session.step(rows, {0: (0, 1000)})
            await healthy.step(counting_rows(1), {0: (0, 1)})

        network = MemoryNetwork(limits=TransportLimits(max_frame_bytes=8192))
        virtually(counting_stage(100), test=test, network=network)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


class TestParking:
    """A tiny Llama; two sessions that each need more than half of the KV."""

    @staticmethod
    async def turns(
        session: RawSession, before: Callable[[], Awaitable[None]]
    ) -> list[torch.Tensor]:
        noise = torch.Generator().manual_seed(1)

        def rows(count: int) -> torch.Tensor:
            return torch.randn(count, 48, generator=noise)

        fork = Operations(forks=((1, 0),), releases=(2,))
        outs = [await session.step(rows(30), {0: (0, 17), 1: (0, 4), 2: (0, 9)}, want="all")]
        await before()
        outs.append(await session.step(rows(2), {0: (17, 1), 1: (17, 1)}, operations=fork))
        await before()
        cut = Operations(truncates=((0, 10),))
        outs.append(await session.step(rows(2), {0: (10, 1), 1: (18, 1)}, operations=cut))
        return outs

    def test_two_that_take_turns_get_what_each_would_alone(self, llama: Path) -> None:
        """They need 3 x 128 tokens each, there are 512: one of them is always away."""
        source = open_source(str(llama))
        stages = [
            partial(stage_of, source, span, kv_tokens=512, limits=Limits(park_idle_s=0.5))
            for span in (Span(0, 3), Span(3, 5))
        ]
        results: dict[str, list[torch.Tensor]] = {}
        parked = 0

        async def alone(s: Swarm) -> None:
            session = await s.client().open(s.route(), sequences=3, max_length=128)
            results["alone"] = await self.turns(session, partial(asyncio.sleep, 0))

        async def both(s: Swarm) -> None:
            async def one(name: str, start_s: float) -> None:
                await asyncio.sleep(start_s)
                session = await s.client().open(s.route(), sequences=3, max_length=128, wait_s=60.0)

                async def pause() -> None:
                    nonlocal parked
                    await asyncio.sleep(2.0)
                    parked += sum(stage.admission.parked for stage in s.stages)

                results[name] = await self.turns(session, pause)
                await session.close()

            async with asyncio.TaskGroup() as group:
                group.create_task(one("first", 0.0))
                group.create_task(one("second", 0.1))
            assert await s.free_tokens() == [512, 512]
            assert [stage.admission.parked for stage in s.stages] == [0, 0]

        virtually(*(make() for make in stages), test=alone)
        virtually(*(make() for make in stages), test=both)
        assert parked > 0
        for name in ("first", "second"):
            pairs = zip(results["alone"], results[name], strict=True)
            assert all(torch.equal(*pair) for pair in pairs)

    def test_a_step_that_can_not_come_back_in_time_says_so(self) -> None:
        """And the session goes on when there is room again."""

        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(), max_length=60)
            await asyncio.sleep(1)
            other = await s.client().open(s.route(), max_length=60, wait_s=5)
            assert s.stages[0].admission.parked == 1

            async def keep_busy() -> None:
                for position in range(50):
                    await other.step(counting_rows(1), {0: (position, 1)})
                    await asyncio.sleep(0.1)

            async with asyncio.TaskGroup() as group:
                busy = group.create_task(keep_busy())
                with pytest.raises(KVFull, match="40 tokens free, 60 asked for"):
                    await session.step(counting_rows(1), {0: (0, 1)}, deadline_ms=2000)
                assert now_s() == pytest.approx(3.0, abs=0.2)
                busy.cancel()
            await other.close()
            session.steps = 0
            assert (await session.step(counting_rows(1), {0: (0, 1)}))[0, 0] == 4

        virtually(counting_stage(100, limits=Limits(park_idle_s=0.5)), test=test)

    def test_closing_a_parked_session_frees_its_memory(self) -> None:
        async def test(s: Swarm) -> None:
            parked = await s.client().open(s.route(), max_length=60)
            await asyncio.sleep(1)
            await s.client().open(s.route(), max_length=60, wait_s=5)
            assert s.stages[0].admission.parked == 1
            await parked.vanish()

            async def gone() -> bool:
                return s.stages[0].admission.parked == 0 and len(s.stages[0].sessions) == 1

            await eventually(gone, "the parked session is gone")
            assert await s.free_tokens() == [40]

        virtually(counting_stage(100, limits=Limits(park_idle_s=0.5)), test=test)
