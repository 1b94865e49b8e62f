"""Waiting for KV: who gets it, what the error says, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bloombee.core import PeerId, SessionId
from bloombee.errors import KVFull, PeerStopping, RequestError
from bloombee.server.admission import Admission
from bloombee.server.executor import ExecutorSettings
from bloombee.server.validation import Limits
from tests.counting_pool import AddingModel, CountingPool
from tests.inline_executor import InlineExecutor
from tests.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def sid(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


@asynccontextmanager
async def admission(
    pool: CountingPool, limits: Limits | None = None
) -> AsyncIterator[tuple[Admission, InlineExecutor]]:
    """Without parking: that has tests of its own."""
    executor = InlineExecutor(AddingModel(), pool, ExecutorSettings())
    executor.start()
    try:
        yield Admission(executor, pool, replace(limits or Limits(), park_bytes=0)), executor
    finally:
        await executor.stop(1.0)


class TestAtOnce:
    def test_what_fits_is_reserved(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, _):
                assert await gate.reserve(A, sid(1), 2, 20, 0) == 60
                with pytest.raises(RequestError, match="holds KV already"):
                    await gate.reserve(A, sid(1), 1, 1, 0)
                await gate.free(sid(1))
                assert await gate.reserve(A, sid(1), 1, 100, 0) == 0

        run(main())

    def test_a_full_server_says_how_much_is_free(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, executor):
                await gate.reserve(A, sid(1), 1, 70, 0)
                with pytest.raises(KVFull) as caught:
                    await gate.reserve(B, sid(2), 2, 20, 0)
                assert str(caught.value) == (
                    "30 tokens free, 40 asked for (2 sequences of 20), waited 0.0 s; "
                    "ask another server, or later"
                )
                assert gate.waiting == 0
                assert await executor.free_tokens() == 30

        run(main())

    @pytest.mark.parametrize(
        ("sequences", "length", "says"),
        [
            (2, 60, r"120 KV tokens asked for \(2 sequences of 60, .*: this server has 100 in all"),
            (3, 20, r"60 KV tokens asked for .*: a peer may hold 50"),
        ],
    )
    def test_what_can_never_fit_is_refused(self, sequences: int, length: int, says: str) -> None:
        async def main() -> None:
            pool = CountingPool(100)
            async with admission(pool, Limits(max_tokens_per_peer=50)) as (gate, _):
                with pytest.raises(RequestError, match=says):
                    await gate.reserve(A, sid(1), sequences, length, 60)

        run(main())

    def test_tokens_are_counted_in_whole_pages(self) -> None:
        async def main() -> None:
            pool = CountingPool(100)
            pool.page_tokens = 16
            async with admission(pool) as (gate, _):
                with pytest.raises(RequestError, match=r"128 KV tokens .* in pages of 16"):
                    await gate.reserve(A, sid(1), 4, 17, 0)

        run(main())

    def test_a_stopped_server_serves_nobody(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, executor):
                await gate.reserve(A, sid(1), 1, 100, 0)
                async with asyncio.TaskGroup() as group:
                    waiting = group.create_task(outcome(gate, B, 2, 10))
                    await asyncio.sleep(1)
                    await executor.stop(1.0)
                    await gate.free(sid(1))
                assert await waiting == "PeerStopping"
                with pytest.raises(PeerStopping):
                    await gate.reserve(A, sid(3), 1, 1, 60)

        run(main())


async def outcome(
    gate: Admission, peer: PeerId, number: int, tokens: int, wait_s: float = 60
) -> float | str:
    """When the request was served, or the name of its error."""
    try:
        await gate.reserve(peer, sid(number), 1, tokens, wait_s)
    except (KVFull, PeerStopping, RequestError) as error:
        return type(error).__name__
    return asyncio.get_running_loop().time()


class TestWaiting:
    def test_it_is_served_when_enough_is_free(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, _):
                for number in range(1, 4):
                    await gate.reserve(A, sid(number), 1, 33, 0)
                async with asyncio.TaskGroup() as group:
                    waiting = group.create_task(outcome(gate, B, 9, 60))
                    for number in range(1, 4):
                        await asyncio.sleep(1)
                        gate.free(sid(number))
                assert waiting.result() == pytest.approx(2)

        run(main())

    def test_the_deadline_is_kept_and_told(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with admission(CountingPool(100), Limits(max_wait_s=7)) as (gate, _):
                await gate.reserve(A, sid(1), 1, 90, 0)
                with pytest.raises(KVFull, match=r"10 tokens free, 20 asked .*, waited 2\.5 s"):
                    await gate.reserve(B, sid(2), 1, 20, 2.5)
                assert loop.time() == pytest.approx(2.5)
                with pytest.raises(KVFull, match=r"waited 7\.0 s"):
                    await gate.reserve(B, sid(2), 1, 20, 100)
                assert loop.time() == pytest.approx(9.5)
                assert gate.waiting == 0

        run(main())

    def test_nobody_jumps_the_queue(self) -> None:
        """Free room that someone else waits for first is no room; the error says so."""

        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, _):
                await gate.reserve(A, sid(1), 1, 60, 0)
                async with asyncio.TaskGroup() as group:
                    first = group.create_task(outcome(gate, B, 2, 50))
                    await asyncio.sleep(0.1)
                    mine = group.create_task(outcome(gate, B, 3, 10))
                    await asyncio.sleep(0.1)
                    with pytest.raises(KVFull, match=r"40 tokens free, .* behind 2 other"):
                        await gate.reserve(B, sid(4), 1, 10, 0)
                    gate.free(sid(1))
                assert first.result() == mine.result() == pytest.approx(0.2)

        run(main())

    def test_a_greedy_peer_does_not_starve_another(self) -> None:
        """Fifty requests of one; the other waits for one session to end, not for fifty."""

        async def main() -> None:
            async with admission(CountingPool(100), Limits(max_wait_s=1000)) as (gate, _):
                ended: list[int] = []

                async def live(peer: PeerId, number: int) -> None:
                    await gate.reserve(peer, sid(number), 1, 100, 1000)
                    await asyncio.sleep(1)
                    ended.append(number)
                    await gate.free(sid(number))

                async with asyncio.TaskGroup() as group:
                    for number in range(50):
                        group.create_task(live(A, number))
                    await asyncio.sleep(0.5)
                    group.create_task(live(B, 100))
                assert ended == [0, 1, 100, *range(2, 50)]

        run(main())

    def test_a_peer_waits_for_its_own_sessions(self) -> None:
        async def main() -> None:
            limits = Limits(max_tokens_per_peer=50)
            async with admission(CountingPool(100), limits) as (gate, _):
                await gate.reserve(A, sid(1), 1, 30, 0)
                async with asyncio.TaskGroup() as group:
                    mine = group.create_task(outcome(gate, A, 2, 30))
                    await asyncio.sleep(1)
                    assert await gate.reserve(B, sid(3), 1, 50, 0) == 20
                    with pytest.raises(KVFull) as caught:
                        await gate.reserve(A, sid(4), 1, 40, 1.0)
                    assert str(caught.value) == (
                        "20 tokens left of the 50 that a peer may hold here, 40 asked for, "
                        "waited 1.0 s; close a session, or ask another server"
                    )
                    gate.free(sid(1))
                assert mine.result() == pytest.approx(2)

        run(main())

    def test_what_the_pool_refuses_for_another_reason_keeps_its_place(self) -> None:
        async def main() -> None:
            pool = FewSlots(100)
            async with admission(pool) as (gate, _):
                await gate.reserve(A, sid(1), 1, 10, 0)
                with pytest.raises(KVFull, match=r"no slot is free; waited 1\.0 s"):
                    await gate.reserve(A, sid(2), 1, 10, 1.0)
                async with asyncio.TaskGroup() as group:
                    waiting = group.create_task(outcome(gate, A, 3, 10))
                    await asyncio.sleep(1)
                    gate.free(sid(1))
                assert waiting.result() == pytest.approx(2)

        run(main())


class TestRenewing:
    def test_it_keeps_its_pages_while_others_wait(self) -> None:
        async def main() -> None:
            pool = CountingPool(100)
            async with admission(pool) as (gate, executor):
                await gate.renew(A, sid(1), 2, 40, 0)
                async with asyncio.TaskGroup() as group:
                    waiting = group.create_task(outcome(gate, B, 2, 50))
                    await asyncio.sleep(1)
                    pool.held[sid(1)] = [7, 8]
                    assert await gate.renew(A, sid(1), 2, 40, 0) == 20
                    assert await executor.call(lambda pool: pool.lengths(sid(1))) == (0, 0)
                    await asyncio.sleep(1)
                    assert not waiting.done()
                    gate.free(sid(1))
                assert waiting.result() == pytest.approx(2)

        run(main())

    def test_on_other_terms_it_asks_like_anyone(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, executor):
                await gate.renew(A, sid(1), 1, 60, 0)
                await gate.reserve(B, sid(2), 1, 30, 0)
                assert await gate.renew(A, sid(1), 1, 70, 0) == 0
                with pytest.raises(KVFull, match="70 tokens free, 71 asked for"):
                    await gate.renew(A, sid(1), 1, 71, 0)
                assert await executor.free_tokens() == 70

        run(main())


class FewSlots(CountingPool):
    def reserve(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> None:
        if self.held:
            raise KVFull("no slot is free")
        super().reserve(session, sequences, max_length, released)


class TestCancelled:
    def test_a_caller_that_goes_leaves_no_trace(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, executor):
                await gate.reserve(A, sid(1), 1, 100, 0)
                async with asyncio.TaskGroup() as group:
                    gone = group.create_task(outcome(gate, B, 2, 100))
                    await asyncio.sleep(1)
                    stays = group.create_task(outcome(gate, C, 3, 10))
                    await asyncio.sleep(1)
                    gone.cancel()
                    await asyncio.sleep(1)
                    gate.free(sid(1))
                assert stays.result() == pytest.approx(3)
                assert await executor.free_tokens() == 90
                assert gate.waiting == 0

        run(main())

    @pytest.mark.parametrize("turns", range(8))
    def test_cancelled_while_it_is_served(self, turns: int) -> None:
        """At whatever moment between asking and having it."""

        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, executor):
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(outcome(gate, A, 1, 60))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                served = not task.cancelled()
                assert await executor.free_tokens() == (40 if served else 100)
                assert await gate.reserve(B, sid(2), 1, 40, 0) == (0 if served else 60)

        run(main())

    def test_a_session_that_nobody_knows_is_freed_all_the_same(self) -> None:
        async def main() -> None:
            async with admission(CountingPool(100)) as (gate, executor):
                await executor.call(lambda pool: pool.reserve(sid(1), 1, 60))
                await gate.free(sid(1))
                assert await executor.free_tokens() == 100

        run(main())

    @pytest.mark.parametrize("seed", range(20))
    def test_random_lives_leak_nothing(self, seed: int) -> None:
        """Sessions that come, wait, give up, are cancelled and end, in any order."""

        async def main() -> None:
            chance = random.Random(seed)
            pool = CountingPool(100)
            limits = Limits(max_tokens_per_peer=chance.choice([None, 60]), max_wait_s=5)
            async with admission(pool, limits) as (gate, executor):
                served = 0

                async def live(number: int) -> None:
                    nonlocal served
                    peer = PeerId(f"{chance.randrange(4)}")
                    await asyncio.sleep(chance.random() * 20)
                    try:
                        wait_s = chance.choice([0, 1, 5])
                        await gate.reserve(peer, sid(number), 1, chance.randint(1, 60), wait_s)
                    except KVFull:
                        return
                    served += 1
                    assert pool.free_tokens >= 0
                    try:
                        await asyncio.sleep(chance.random() * 3)
                    finally:
                        gate.free(sid(number))

                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(live(number)) for number in range(60)]
                    for task in chance.sample(tasks, 20):
                        await asyncio.sleep(chance.random())
                        task.cancel()
                assert served > 10
                assert gate.waiting == 0
                assert await executor.free_tokens() == 100
                assert pool.held == {}

        run(main())
