"""The compute thread merges, cuts, retries and reports; the pool stays consistent."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.core import PackedTable, Phase, SessionId, Span
from bloombee.errors import KVFull, PeerStopping, RequestError, StepFailed
from bloombee.protocol.messages import Operations
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.work import Outcome, StepWork
from tests.counting_pool import SPAN, WIDTH, AddingModel, CountingPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bloombee.kv.interface import KVPool

A, B, C = (SessionId(bytes([letter]) * 16) for letter in b"ABC")


@dataclass
class Bench:
    executor: Executor
    model: AddingModel
    pool: CountingPool

    def submit(
        self,
        session: SessionId,
        table: PackedTable,
        *,
        phase: Phase = Phase.DECODE,
        operations: Operations | None = None,
        wanted: str = "all",
        span: Span = SPAN,
    ) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        rows = torch.arange(float(table.tokens))[:, None].expand(-1, WIDTH)
        self.executor.submit(
            StepWork(
                session=session,
                step=1,
                phase=phase,
                span=span,
                table=table,
                touches=frozenset(table.sequences),
                operations=operations,
                rows=rows,
                wanted=wanted,  # type: ignore[reportArgumentType] - a literal at every call
                wire_dtype=torch.float32,
                done=future.set_result,
            )
        )
        return future

    @asynccontextmanager
    async def held_up(self) -> AsyncIterator[None]:
        """What is submitted inside waits until the block ends, and is then seen at once."""
        entered, gate = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def wait(pool: KVPool) -> bool:
            loop.call_soon_threadsafe(entered.set)
            return gate.wait(10)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.executor.call(wait))
            await entered.wait()
            yield
            gate.set()
        assert task.result()


def run(test: Callable[[Bench], Awaitable[None]], pass_tokens: int = 8) -> None:
    async def main() -> None:
        model, pool = AddingModel(), CountingPool()
        executor = Executor(model, pool, ExecutorSettings(pass_tokens=pass_tokens))
        executor.start()
        for session in (A, B, C):
            await executor.call(lambda pool, session=session: pool.reserve(session, 3, 50))
        try:
            await test(Bench(executor, model, pool))
        finally:
            await executor.stop(5.0)

    asyncio.run(asyncio.wait_for(main(), 20))


def first(outcome: Outcome) -> list[float]:
    assert outcome.error is None and outcome.rows is not None
    return outcome.rows[:, 0].tolist()


def chain(*counts: int, start: int = 0) -> PackedTable:
    return PackedTable(tuple(range(len(counts))), (start,) * len(counts), counts)


def test_a_step_comes_back_computed() -> None:
    async def test(bench: Bench) -> None:
        outcome = await bench.submit(A, chain(2, 1))
        assert first(outcome) == [4, 5, 6]
        assert bench.model.was_inference
        assert await bench.executor.call(lambda pool: pool.lengths(A)) == (2, 1, 0)

    run(test)


def test_waiting_sessions_share_a_pass() -> None:
    async def test(bench: Bench) -> None:
        async with bench.held_up():
            waiting = [bench.submit(session, chain(1)) for session in (A, B, C)]
        assert [first(await future) for future in waiting] == [[4], [4], [4]]
        assert [[session for session, _ in batch] for batch in bench.model.batches] == [[A, B, C]]

    run(test)


def test_steps_of_one_session_share_a_pass_when_they_share_no_sequence() -> None:
    async def test(bench: Bench) -> None:
        async with bench.held_up():
            parts = [bench.submit(A, PackedTable((n,), (0,), (1,))) for n in (0, 1, 2)]
            again = bench.submit(A, PackedTable((1,), (1,), (1,)))
        assert [first(await part) for part in (*parts, again)] == [[4]] * 4
        assert [len(batch) for batch in bench.model.batches] == [3, 1]
        assert await bench.executor.call(lambda pool: pool.lengths(A)) == (1, 2, 1)

    run(test)


def test_one_bad_session_does_not_fail_the_others() -> None:
    async def test(bench: Bench) -> None:
        bench.model.failing[B] = RuntimeError("out of luck\nsecond line")
        async with bench.held_up():
            a, b, c = [bench.submit(session, chain(1)) for session in (A, B, C)]
        assert first(await a) == first(await c) == [4]
        error = (await b).error
        assert type(error) is StepFailed and str(error) == "RuntimeError: out of luck"
        lengths = [
            await bench.executor.call(lambda pool, s=s: pool.lengths(s)[0]) for s in (A, B, C)
        ]
        assert lengths == [1, 0, 1]

    run(test)


def test_long_steps_run_in_chunks_and_come_back_whole() -> None:
    async def test(bench: Bench) -> None:
        outcome = await bench.submit(A, chain(11, 9), phase=Phase.PREFILL)
        assert first(outcome) == [4.0 + row for row in range(20)]
        counts = [[table.counts for _, table in batch] for batch in bench.model.batches]
        assert counts == [[(8,)], [(3, 5)], [(4,)]]

    run(test)


def test_last_rows_of_a_step_in_chunks() -> None:
    async def test(bench: Bench) -> None:
        last = bench.submit(A, chain(11, 9), phase=Phase.PREFILL, wanted="last")
        assert first(await last) == [4 + 10, 4 + 19]
        none = (await bench.submit(B, chain(11, 9), phase=Phase.PREFILL, wanted="none")).rows
        assert none is not None and none.shape == (0, WIDTH)

    run(test)


def test_a_failure_halfway_forgets_the_chunks_before_it() -> None:
    async def test(bench: Bench) -> None:
        async with bench.held_up():
            broken = bench.submit(A, chain(20), phase=Phase.PREFILL)
            bench.model.failing[A] = MemoryError()
        assert str((await broken).error) == "MemoryError"
        assert await bench.executor.call(lambda pool: pool.lengths(A)) == (0, 0, 0)

    run(test)


def test_a_failure_in_a_later_chunk_rolls_back() -> None:
    async def test(bench: Bench) -> None:
        forward = bench.model.forward

        def second_fails(*args: Any, **kwargs: Any) -> torch.Tensor:
            if len(bench.model.batches) == 1:
                raise RuntimeError("second chunk")
            return forward(*args, **kwargs)

        bench.model.forward = second_fails
        outcome = await bench.submit(A, chain(12), phase=Phase.PREFILL)
        assert str(outcome.error) == "RuntimeError: second chunk"
        assert await bench.executor.call(lambda pool: pool.lengths(A)) == (0, 0, 0)

    run(test)


def test_operations_run_once_before_the_tokens() -> None:
    async def test(bench: Bench) -> None:
        await bench.submit(A, chain(5, 2))
        operations = Operations(forks=((1, 0), (2, 0)), truncates=((1, 4),), releases=(2,))
        table = PackedTable((0, 1), (5, 4), (9, 9))
        outcome = await bench.submit(A, table, phase=Phase.PREFILL, operations=operations)
        assert outcome.error is None
        assert bench.pool.calls == ["fork ((1, 0), (2, 0))", "truncate 1 4", "release 2"]
        assert await bench.executor.call(lambda pool: pool.lengths(A)) == (14, 13, 0)

    run(test)


def test_errors_of_our_tree_pass_as_they_are() -> None:
    async def test(bench: Bench) -> None:
        wrong = await bench.submit(A, chain(1, start=7))
        assert type(wrong.error) is RequestError
        with pytest.raises(KVFull, match="550 tokens free"):
            await bench.executor.call(lambda pool: pool.reserve(SessionId(b"D" * 16), 1, 10_000))
        with pytest.raises(StepFailed, match="ZeroDivisionError"):
            await bench.executor.call(lambda pool: 1 // 0)

    run(test)


def test_freeing_a_session_fails_its_waiting_steps_only() -> None:
    async def test(bench: Bench) -> None:
        async with bench.held_up():
            a, b = bench.submit(A, chain(1)), bench.submit(B, chain(1))
            freed = bench.executor.free(A)
        await freed
        assert type((await a).error) is RequestError
        assert first(await b) == [4]
        assert await bench.executor.free_tokens() == 1000 - 300

    run(test)


def test_a_part_of_the_span() -> None:
    async def test(bench: Bench) -> None:
        assert first(await bench.submit(A, chain(1), span=Span(1, 2))) == [1]
        assert bench.model.spans == [Span(1, 2)]

    run(test)


def test_stopping_answers_everyone() -> None:
    async def test(bench: Bench) -> None:
        async with bench.held_up():
            waiting = bench.submit(A, chain(1))
            stopping = asyncio.get_running_loop().create_task(bench.executor.stop(5.0))
            await asyncio.sleep(0)
        await stopping
        assert type((await waiting).error) is PeerStopping
        assert type((await bench.submit(A, chain(1))).error) is PeerStopping
        with pytest.raises(PeerStopping):
            await bench.executor.free_tokens()
        await bench.executor.free(A)

    run(test)
