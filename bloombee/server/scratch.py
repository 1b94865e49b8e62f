"""A session of the server's own, to time passes with; it goes through the executor as others do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from bloombee.core import PackedTable, Phase, SessionId, Span
from bloombee.kv.interface import KVPool
from bloombee.models.sampling import Chooser
from bloombee.protocol.messages import Sampling
from bloombee.server.executor import Executor
from bloombee.server.work import PROFILER, Model, Outcome, StepWork
from bloombee.telemetry import now_us

PASS_DEADLINE_S = 120.0
Done = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A pass to time: `count` new tokens of each of `rows` sequences, through `span`.

    With `chooses` a token is chosen for each row at its end.
    """

    rows: int = 1
    count: int = 1
    phase: Phase = Phase.DECODE
    span: Span | None = None
    chooses: bool = False


class Scratch:
    """Sequences that hold `context` tokens each, and those that trials have added."""

    def __init__(self, executor: Executor, model: Model, context: int) -> None:
        self.session = SessionId(secrets.token_bytes(16))
        self.context = context
        self._executor = executor
        self._model = model
        self._added = 0
        self._steps = 0

    async def seconds(self, trial: Trial) -> float:
        """From handing a pass over until what came of it is back on the event loop.

        Raises what the pass fails of, TimeoutError when it takes minutes. Modifies the
        pool: the sequences of the trial are longer by `count`; all trials up to `reset` are
        to have the same rows.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[int, Outcome]] = loop.create_future()
        work = self._work(trial, lambda outcome: _set(ended, outcome))
        started_us = now_us()
        self._executor.submit(work)
        async with asyncio.timeout(PASS_DEADLINE_S):
            ended_us, outcome = await ended
        if outcome.error is not None:
            raise outcome.error
        self._added += trial.count
        return (ended_us - started_us) / 1e6

    async def reset(self, rows: int) -> None:
        """Forget what trials of so many rows added."""

        def truncate(pool: KVPool) -> None:
            for sequence in range(rows):
                pool.truncate(self.session, sequence, self.context)

        await self._executor.call(truncate)
        self._added = 0

    def _work(self, trial: Trial, done: Done) -> StepWork:
        model, rows = self._model, trial.rows
        self._steps += 1
        start = self.context + self._added
        sampling = Sampling(budget=1 << 20)
        choosers = [Chooser.of(sampling, model.vocab_size) for _ in range(rows * trial.chooses)]
        return StepWork(
            session=self.session,
            step=self._steps,
            phase=trial.phase,
            span=trial.span or model.span,
            table=PackedTable(tuple(range(rows)), (start,) * rows, (trial.count,) * rows),
            touches=frozenset(range(rows)),
            operations=None,
            rows=torch.randn(rows * trial.count, model.hidden_size).to(model.dtype),
            wanted="all",
            wire_dtype=model.dtype,
            done=done,
            client=PROFILER,
            choosers=tuple(choosers),
        )


@asynccontextmanager
async def scratch(
    executor: Executor, model: Model, *, sequences: int, context: int, spare: int
) -> AsyncGenerator[Scratch]:
    """`sequences` that hold `context` tokens and may hold `spare` more; gone afterwards.

    Raises KVFull when there is no room for them.
    """
    made = Scratch(executor, model, context)

    def reserve(pool: KVPool) -> None:
        pool.reserve(made.session, sequences, context + spare)
        if not context:
            return
        shape = pool.shape
        size = (context, shape.kv_heads, shape.head_size)
        rows = torch.randn(size, device=shape.device).to(shape.dtype)
        for sequence in range(sequences):
            for block in shape.blocks():
                pool.load(made.session, sequence, block, rows, rows)

    try:
        await executor.call(reserve)
        yield made
    finally:
        await executor.free(made.session)


def _set(ended: asyncio.Future[tuple[int, Outcome]], outcome: Outcome) -> None:
    if not ended.done():
        ended.set_result((now_us(), outcome))
