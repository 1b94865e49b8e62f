"""The paced executor: passes take as long as asked for, and are written down."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import torch

from bloombee.core import PackedTable, Phase, SessionId
from bloombee.server.executor import ExecutorSettings
from bloombee.server.pacing import Diary, PacedExecutor, needed, read_diary
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


def test_what_rows_need_lies_on_straight_lines_between_what_is_told() -> None:
    needs = ((8, 100), (32, 340))
    assert [needed(needs, rows) for rows in (1, 8, 14, 32, 64)] == [100, 100, 160, 340, 340]


def test_passes_need_what_they_are_told_to(tmp_path: Path) -> None:
    diary, needs = tmp_path / "diary.jsonl", tmp_path / "needs.json"
    needs.write_text("[[1, 100000], [4, 400000]]")

    async def run() -> None:
        pool = CountingPool()
        pool.reserve(SESSION, 2, 8)
        executor = PacedExecutor(
            BusyModel(), pool, ExecutorSettings(), pace=1.5, diary=Diary(diary), needs=needs
        )
        executor.start()
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        executor.submit(work(PackedTable((0, 1), (0, 0), (1, 1)), Phase.DECODE, done))
        assert (await done).error is None
        await executor.stop(1.0)

    asyncio.run(run())
    (entry,) = read_diary(diary)
    assert entry.cpu_us == 200_000
    assert 300_000 <= entry.ended_us - entry.started_us < 400_000
