"""The paced executor: passes take as long as asked for, and are written down."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import torch

from bloombee.core import PackedTable, Phase, SessionId
from bloombee.server.executor import ExecutorSettings
from bloombee.server.pacing import Diary, PacedExecutor, read_diary
from bloombee.server.work import Outcome, StepWork
from tests.counting_pool import SPAN, WIDTH, AddingModel, CountingPool

if TYPE_CHECKING:
    from pathlib import Path

BUSY_S = 0.02
SESSION = SessionId(bytes(16))


class BusyModel(AddingModel):
    """Needs the processor for a while."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        return super().forward(*args, **kwargs)  # type: ignore[reportArgumentType] - passed on


def work(table: PackedTable, phase: Phase, done: asyncio.Future[Outcome]) -> StepWork:
    return StepWork(
        session=SESSION,
        step=1,
        phase=phase,
        span=SPAN,
        table=table,
        touches=frozenset(table.sequences),
        operations=None,
        rows=torch.zeros(table.tokens, WIDTH),
        wanted="all",
        wire_dtype=torch.float32,
        done=done.set_result,
    )


def test_passes_are_slowed_and_written_down(tmp_path: Path) -> None:
    file = tmp_path / "diary.jsonl"

    async def run() -> None:
        pool = CountingPool()
        pool.reserve(SESSION, 2, 8)
        model = BusyModel()
        executor = PacedExecutor(model, pool, ExecutorSettings(), pace=4, diary=Diary(file))
        executor.start()
        for table, phase in (
            (PackedTable((0, 1), (0, 0), (3, 2)), Phase.PREFILL),
            (PackedTable((0, 1), (3, 2), (1, 1)), Phase.DECODE),
        ):
            done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            executor.submit(work(table, phase, done))
            outcome = await done
            assert outcome.error is None
        await executor.stop(1.0)

    asyncio.run(run())
    prompt, decode = read_diary(file)
    assert (prompt.prompt_tokens, prompt.decode_tokens) == (5, 0)
    assert (decode.prompt_tokens, decode.decode_tokens) == (0, 2)
    assert min(prompt.cpu_us, decode.cpu_us) >= BUSY_S * 1e6
    assert decode.ended_us - decode.started_us >= 4 * decode.cpu_us
    assert prompt.ended_us - prompt.started_us >= prompt.cpu_us
    assert decode.started_us >= prompt.ended_us
