"""The executor that swarms in virtual time compute with: the real queue, in the loop's time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from bloombee.core import PackedTable, Phase, SessionId, Span
from bloombee.errors import PeerStopping, StepFailed
from bloombee.kv.interface import BatchItem
from bloombee.server.executor import ExecutorSettings
from bloombee.server.work import Outcome, StepWork
from tests.inline_executor import InlineExecutor
from tests.swarm.chaos.digests import DigestModel, DigestPool, embed, to_numbers
from tests.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SPAN = Span(0, 2)
SESSION = SessionId(bytes(16))


class Bench:
    """An executor whose passes take a second, and what came of its steps when."""

    def __init__(self) -> None:
        self.model = DigestModel(SPAN)
        self.pool = DigestPool(SPAN, 400)
        settings = ExecutorSettings(pass_tokens=4)
        self.executor = InlineExecutor(self.model, self.pool, settings, lambda tokens: 1.0)
        self.outcomes: list[tuple[float, Outcome]] = []

    def submit(self, step: int, ids: list[int], first: int) -> None:
        def done(outcome: Outcome) -> None:
            self.outcomes.append((asyncio.get_running_loop().time(), outcome))

        self.executor.submit(
            StepWork(
                session=SESSION,
                step=step,
                phase=Phase.PREFILL,
                span=SPAN,
                table=PackedTable((0,), (first,), (len(ids),)),
                touches=frozenset((0,)),
                operations=None,
                rows=embed(ids, range(first, first + len(ids))),
                wanted="all",
                wire_dtype=torch.float32,
                done=done,
            )
        )


def bench(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        b = Bench()
        b.executor.start()
        await b.executor.call(lambda pool: pool.reserve(SESSION, 1, 100))
        await test(b)
        await b.executor.stop(1.0)

    run(main())


def test_steps_take_their_time_one_pass_after_the_other() -> None:
    async def test(b: Bench) -> None:
        b.submit(1, [1, 2, 3], 0)
        b.submit(2, [4, 5, 6, 7, 8], 3)
        await asyncio.sleep(10.0)
        assert [at for at, _ in b.outcomes] == [1.0, 3.0]  # the second needs two passes
        model, pool = DigestModel(SPAN), DigestPool(SPAN, 400)
        pool.reserve(SESSION, 1, 100)
        whole = model.forward(
            embed(range(1, 9), range(8)),
            [BatchItem(SESSION, PackedTable((0,), (0,), (8,)))],
            pool,
        )
        got = torch.cat([outcome.rows for _, outcome in b.outcomes if outcome.rows is not None])
        assert to_numbers(got) == to_numbers(whole)

    bench(test)


def test_calls_wait_for_the_pass_and_go_before_steps() -> None:
    async def test(b: Bench) -> None:
        b.submit(1, [1, 2], 0)
        await asyncio.sleep(0.5)
        b.submit(2, [3], 2)
        assert await b.executor.call(lambda pool: pool.lengths(SESSION)) == (2,)
        assert asyncio.get_running_loop().time() == 2.0  # answers go out after the pass

    bench(test)


def test_a_failing_pass_fails_its_step_only() -> None:
    async def test(b: Bench) -> None:
        b.model.failures.append(ValueError("broken"))
        b.submit(1, [1, 2], 0)
        await asyncio.sleep(5.0)
        b.submit(2, [1, 2], 0)
        await asyncio.sleep(5.0)
        (_, failed), (_, done) = b.outcomes
        assert isinstance(failed.error, StepFailed)
        assert done.rows is not None

    bench(test)


def test_stopping_fails_what_waits_and_a_crash_answers_nothing() -> None:
    async def test(b: Bench) -> None:
        b.submit(1, [1, 2], 0)
        await b.executor.stop(5.0)
        assert isinstance(b.outcomes[0][1].error, PeerStopping)
        with pytest.raises(PeerStopping):
            await b.executor.free_tokens()

        crashed = Bench()
        crashed.executor.start()
        await crashed.executor.call(lambda pool: pool.reserve(SESSION, 1, 100))
        crashed.submit(1, [1, 2], 0)
        await asyncio.sleep(0.5)
        crashed.executor.crash()
        await asyncio.sleep(5.0)
        assert crashed.outcomes == []

    bench(test)
