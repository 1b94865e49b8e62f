"""Idle sessions make room for those that wait, and come back as they were, bit for bit."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from bloombee.errors import KVFull, RequestError
from bloombee.protocol.messages import Operations
from tests.kv_bench import PEER, TOTAL, Bench, bench, chain, contiguous, paged, sid
from tests.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bloombee.kv import KVPool


@pytest.fixture(params=[contiguous, paged])
def pool(request: pytest.FixtureRequest) -> KVPool:
    return request.param()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tokens of one block in a job."""
    monkeypatch.setattr("bloombee.server.parking.JOB_BYTES", 7 * 2 * 2 * 8 * 4)


async def life(bench: Bench) -> list[torch.Tensor]:
    """A session of three sequences with a fork and a release; what its steps give."""
    outs = [await bench.step(1, chain((0, 0, 20), (1, 0, 3), (2, 0, 9)), 1)]
    fork = Operations(forks=((1, 0),), truncates=((0, 15),), releases=(2,))
    outs.append(await bench.step(1, chain((0, 15, 2), (1, 20, 1)), 2, fork))
    return outs


async def go_on(bench: Bench, wait_s: float = 60) -> list[torch.Tensor]:
    outs = [await bench.step(1, chain((0, 17, 1), (1, 21, 2)), 3, wait_s=wait_s)]
    fork = Operations(forks=((0, 1),))
    return [*outs, await bench.step(1, chain((0, 23, 1), (1, 23, 1)), 4, fork, wait_s=wait_s)]


class TestParked:
    def test_it_comes_back_bit_for_bit(self, pool: KVPool) -> None:
        """Two pages a sequence and three sequences, one of them released."""

        async def main(fresh: KVPool, *, parked: bool) -> list[torch.Tensor]:
            async with bench(fresh) as b:
                await b.open(1, 3, 32)
                outs = await life(b)
                if parked:
                    await b.open(2, 1, TOTAL, wait_s=20)
                    assert asyncio.get_running_loop().time() == pytest.approx(5, abs=0.1)
                    assert (b.gate.parked, await b.executor.free_tokens()) == (1, 0)
                    with pytest.raises(RequestError, match="not open"):
                        await b.executor.call(lambda pool: pool.lengths(sid(1)))
                    b.gate.free(sid(2))
                outs += await go_on(b)
                assert b.gate.parked == 0
                assert await b.executor.free_tokens() == TOTAL - 2 * 32
                fresh.check_integrity()
                await b.gate.free(sid(1))
                fresh.check_integrity()
                assert fresh.free_tokens == TOTAL
                return outs

        other = contiguous() if isinstance(pool, type(contiguous())) else paged()
        left = run(main(other, parked=False))
        came_back = run(main(pool, parked=True))
        assert all(torch.equal(*pair) for pair in zip(left, came_back, strict=True))
        assert left[-1].abs().sum() > 0

    def test_an_empty_session_parks_and_returns(self, pool: KVPool) -> None:
        async def main() -> None:
            async with bench(pool) as b:
                await b.open(1, 3, 64)
                await b.open(2, 1, 32, wait_s=20)
                await b.gate.free(sid(2))
                await b.step(1, chain((0, 0, 3)), 1)
                assert b.gate.parked == 0

        run(main())

    def test_the_longest_idle_goes_and_only_as_many_as_needed(self, pool: KVPool) -> None:
        async def main() -> None:
            async with bench(pool) as b:
                for number in (1, 2, 3):
                    await b.open(number, 1, 64)
                for number in (2, 3, 1):
                    await asyncio.sleep(1)
                    await b.step(number, chain((0, 0, 10)), number)
                await b.open(4, 1, 64, wait_s=20)
                assert asyncio.get_running_loop().time() == pytest.approx(6, abs=0.1)
                assert b.gate.parked == 1
                for number in (1, 3):
                    await b.step(number, chain((0, 10, 1)), 9)
                assert b.gate.parked == 1
                with pytest.raises(KVFull, match=r"0 tokens free, 64 asked for"):
                    await b.step(2, chain((0, 10, 1)), 9)

        run(main())

    def test_a_session_in_use_stays(self, pool: KVPool) -> None:
        """Its step takes ten seconds; five more must pass."""

        async def main() -> None:
            async with bench(pool, lambda tokens: 10.0 if tokens else 0.0) as b:
                await b.open(1, 1, TOTAL)
                async with asyncio.TaskGroup() as group:
                    group.create_task(b.step(1, chain((0, 0, 10)), 1))
                    await b.open(2, 1, 16, wait_s=60)
                assert asyncio.get_running_loop().time() == pytest.approx(15, abs=0.2)

        run(main())

    def test_who_is_used_while_it_is_copied_stays(self, pool: KVPool) -> None:
        async def main() -> None:
            async with bench(pool, max_wait_s=8.0) as b:
                await b.open(1, 1, TOTAL)
                await b.step(1, chain((0, 0, 60)), 1)
                save = b.executor.call
                jobs = 0

                async def interrupted(function: Callable[[KVPool], object]) -> object:
                    nonlocal jobs
                    result = await save(function)
                    if isinstance(function, partial):
                        jobs += 1
                        if jobs == 4:
                            await b.step(1, chain((0, 60, 1)), 2)
                    return result

                b.executor.call = interrupted
                with pytest.raises(KVFull, match=r"waited 8\.0 s"):
                    await b.open(2, 1, 16, wait_s=60)
                assert jobs == 4
                assert b.gate.parked == 0
                assert await save(lambda pool: pool.lengths(sid(1))) == (61,)

        run(main())

    def test_who_is_closed_while_it_is_copied_is_gone(self, pool: KVPool) -> None:
        async def main() -> None:
            async with bench(pool) as b:
                await b.open(1, 1, TOTAL)
                await b.step(1, chain((0, 0, 60)), 1)
                async with asyncio.TaskGroup() as group:
                    waiting = group.create_task(b.open(2, 1, 16, wait_s=60))
                    while not b.gate._parking.busy:
                        await asyncio.sleep(0.1 if not b.gate.waiting else 0)
                        if not b.gate._parking.busy and not waiting.done():
                            await asyncio.sleep(0.01)
                    b.gate.free(sid(1))
                assert b.gate.parked == 0
                assert pool.free_tokens == TOTAL - 16

        run(main())

    def test_others_steps_run_between_the_pieces(self, pool: KVPool) -> None:
        """Never more than one job of copying between two passes."""

        async def main() -> None:
            async with bench(pool, lambda tokens: 1.0 if tokens else 0.0) as b:
                await b.open(1, 1, 128)
                await b.step(1, chain((0, 0, 100)), 1)
                await b.open(2, 1, 64)
                order: list[str] = []
                async with asyncio.TaskGroup() as group:
                    third = group.create_task(b.open(3, 1, 64, wait_s=60))
                    await asyncio.sleep(4.5)
                    ask = b.executor.ask

                    def spy(function: Callable[[KVPool], object]) -> object:
                        order.append("call")
                        return ask(function)

                    b.executor.ask = spy  # type: ignore[reportAttributeAccessIssue] - a spy
                    position = 0
                    while not third.done():
                        await b.step(2, chain((0, position, 1)), 1)
                        order.append("step")
                        position += 1
                calls = "".join(word[0] for word in order).split("s")
                assert max(map(len, calls)) <= 2  # a piece, and a round of admission
                assert position > 2

        run(main())


class TestLimits:
    def test_no_more_than_the_memory_for_it(self, pool: KVPool) -> None:
        """60 tokens on two blocks take 15,360 bytes; two such don't fit."""

        async def main() -> None:
            async with bench(pool, park_bytes=20_000, max_wait_s=8.0) as b:
                for number in (1, 2):
                    await b.open(number, 1, 96)
                    await b.step(number, chain((0, 0, 60)), number)
                await b.open(3, 1, 96, wait_s=60)
                await b.step(3, chain((0, 0, 60)), 3)
                assert b.gate.parked == 1
                with pytest.raises(KVFull, match="0 tokens free, 96 asked for"):
                    await b.open(4, 1, 96, wait_s=60)
                await b.gate.free(sid(1))  # its place in host memory is free now
                await b.open(4, 1, 96, wait_s=60)
                assert b.gate.parked == 1
                await b.step(3, chain((0, 60, 1)), 3)

        run(main())

    def test_none_is_parked_for_nothing(self, pool: KVPool) -> None:
        """Sessions in use leave too little for the request, whoever is parked."""

        async def main() -> None:
            async with bench(pool, max_wait_s=20.0) as b:
                await b.open(1, 1, 64)
                await b.open(2, 1, 64)
                async with b.gate.use(sid(2), 0):
                    with pytest.raises(KVFull):
                        await b.open(3, 1, TOTAL, wait_s=60)
                assert b.gate.parked == 0

        run(main())

    def test_no_memory_for_it_means_no_parking(self, pool: KVPool) -> None:
        async def main() -> None:
            async with bench(pool, park_bytes=0, max_wait_s=20.0) as b:
                await b.open(1, 1, TOTAL)
                with pytest.raises(KVFull, match=r"waited 20\.0 s"):
                    await b.open(2, 1, 16, wait_s=60)

        run(main())


class TestComingBack:
    @asynccontextmanager
    async def with_one_parked(self, pool: KVPool) -> AsyncIterator[Bench]:
        """Session 1 is parked; 2 has all pages and is in use."""
        async with bench(pool) as b:
            await b.open(1, 1, 100)
            await b.step(1, chain((0, 0, 60)), 1)
            await b.open(2, 1, TOTAL, wait_s=20)
            async with b.gate.use(sid(2), 0):
                yield b

    def test_it_waits_for_its_deadline_and_loses_nothing(self, pool: KVPool) -> None:
        async def main() -> None:
            async with self.with_one_parked(pool) as b:
                with pytest.raises(KVFull, match=r"0 tokens free, 112 asked .* waited 3\.0 s"):
                    await b.step(1, chain((0, 60, 1)), 2, wait_s=3)
                assert (b.gate.parked, b.gate.waiting) == (1, 0)
                b.gate.free(sid(2))
                await b.step(1, chain((0, 60, 1)), 2)
                assert b.gate.parked == 0

        run(main())

    def test_it_goes_before_those_who_are_new(self, pool: KVPool) -> None:
        async def main() -> None:
            async with self.with_one_parked(pool) as b, asyncio.TaskGroup() as group:
                new = group.create_task(b.open(3, 1, 100, wait_s=60))
                await asyncio.sleep(1)
                back = group.create_task(b.step(1, chain((0, 60, 1)), 2, wait_s=60))
                await asyncio.sleep(1)
                b.gate.free(sid(2))
                await back
                assert not new.done()
                b.gate.free(sid(1))

        run(main())

    def test_starting_anew_it_goes_before_those_who_are_new(self, pool: KVPool) -> None:
        """What was kept of it is dropped at once; when it gives up, nothing is left."""

        async def main() -> None:
            async with self.with_one_parked(pool) as b:
                with pytest.raises(KVFull):
                    await b.gate.renew(PEER, sid(1), 1, 100, 1.0)
                with pytest.raises(RequestError, match="holds no KV"):
                    await b.gate.bring_back(sid(1), 0)
            pool.free(sid(2))
            async with self.with_one_parked(pool) as b, asyncio.TaskGroup() as group:
                new = group.create_task(b.open(3, 1, 100, wait_s=60))
                await asyncio.sleep(1)
                back = group.create_task(b.gate.renew(PEER, sid(1), 1, 100, 60))
                await asyncio.sleep(1)
                assert b.gate.parked == 0
                b.gate.free(sid(2))
                await back
                assert not new.done()
                assert pool.lengths(sid(1)) == (0,)
                b.gate.free(sid(1))

        run(main())

    def test_closed_while_it_waits(self, pool: KVPool) -> None:
        async def main() -> None:
            async with self.with_one_parked(pool) as b:
                async with asyncio.TaskGroup() as group:
                    back = group.create_task(failed(b.step(1, chain((0, 60, 1)), 2, wait_s=60)))
                    await asyncio.sleep(1)
                    b.gate.free(sid(1))
                assert back.result() == "the session was closed"
                assert (b.gate.parked, b.gate.waiting) == (0, 0)
                await b.gate.free(sid(2))
                assert pool.free_tokens == TOTAL

        run(main())

    @pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
    def test_cancelled_on_its_way_back(self, pool: KVPool, turns: int) -> None:
        """Whenever that is, it can come back later, and its pages are not lost."""

        async def main() -> None:
            async with self.with_one_parked(pool) as b:
                await b.gate.free(sid(2))
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(b.step(1, chain((0, 60, 1)), 2, wait_s=60))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                await asyncio.sleep(1)
                pool.check_integrity()
                assert pool.free_tokens == (TOTAL if b.gate.parked else TOTAL - 112)
                at = 60 if b.gate.parked else pool.lengths(sid(1))[0]
                await b.step(1, chain((0, at, 1)), 2)
                assert pool.free_tokens == TOTAL - 112
                pool.check_integrity()

        run(main())


async def failed(work: object) -> str:
    try:
        await work  # type: ignore[reportGeneralTypeIssues] - a coroutine
    except RequestError as error:
        return str(error)
    return ""
