"""Admission over real pools in virtual time, with a model whose output tells all of its KV."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bloombee.core import PackedTable, PeerId, Phase, SessionId, Span
from bloombee.errors import Unsupported
from bloombee.kv import BatchItem, KVPool, KVShape, make_pool
from bloombee.kv.paged import make_paged
from bloombee.server.admission import Admission
from bloombee.server.executor import ExecutorSettings
from bloombee.server.validation import Limits
from bloombee.server.work import Outcome, StepWork
from tests.inline_executor import InlineExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bloombee.protocol.messages import Operations

PEER = PeerId("a")
SHAPE = KVShape(Span(2, 6), 2, 8, torch.float32, torch.device("cpu"))
PART = Span(3, 5)
PAGE, PAGES = 16, 12
TOTAL = PAGE * PAGES
WIDTH = 4


def sid(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def contiguous() -> KVPool:
    return make_pool(SHAPE, TOTAL, max_length=TOTAL, page_tokens=PAGE)


def paged() -> KVPool:
    return make_paged(SHAPE, PAGES, TOTAL, PAGE)


class WritingModel:
    """Writes keys and values that tell session, step and block; its output sums attention."""

    span = SHAPE.span
    hidden_size = WIDTH
    vocab_size = 0
    device = torch.device("cpu")
    dtype = torch.float32

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise Unsupported("no tokens here")

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        raise Unsupported("no tokens here")

    def forward(
        self,
        rows: torch.Tensor,
        batch: Sequence[BatchItem],
        pool: KVPool,
        span: Span | None = None,
    ) -> torch.Tensor:
        plan = pool.begin(batch)
        noise = torch.Generator().manual_seed(int(rows.sum()))
        out = torch.zeros(len(rows))
        for block in range((span or self.span).start, (span or self.span).end):
            query, key, value = torch.randn(3, len(rows), 2, 8, generator=noise)
            out += pool.attend(plan, block, query, key, value, scaling=0.3).sum((1, 2))
        pool.finish(plan)
        return out[:, None].expand(-1, WIDTH)


@dataclass
class Bench:
    gate: Admission
    executor: InlineExecutor
    pool: KVPool

    async def open(self, number: int, sequences: int, length: int, wait_s: float = 0) -> None:
        await self.gate.reserve(PEER, sid(number), sequences, length, wait_s)

    async def step(
        self,
        number: int,
        table: PackedTable,
        seed: int,
        operations: Operations | None = None,
        wait_s: float = 0,
    ) -> torch.Tensor:
        """Run one step under the session's use; its rows."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        await self.gate.bring_back(sid(number), wait_s)
        releases = operations.releases if operations is not None else ()
        self.executor.submit(
            StepWork(
                session=sid(number),
                step=1,
                phase=Phase.PREFILL,
                span=PART,
                table=table,
                touches=frozenset(table.sequences),
                operations=operations,
                rows=torch.full((table.tokens, WIDTH), float(seed)),
                wanted="all",
                wire_dtype=torch.float32,
                done=self.gate.begin_step(sid(number), PART, releases, done.set_result),
            )
        )
        outcome = await done
        assert outcome.error is None and outcome.rows is not None
        return outcome.rows


@asynccontextmanager
async def bench(
    pool: KVPool, compute_s: Callable[[int], float] = lambda tokens: 0.0, **limits: float
) -> AsyncIterator[Bench]:
    executor = InlineExecutor(WritingModel(), pool, ExecutorSettings(), compute_s)
    executor.start()
    settings = {"park_idle_s": 5.0, "park_bytes": 1 << 20} | limits
    try:
        yield Bench(Admission(executor, pool, Limits(**settings)), executor, pool)  # type: ignore[reportArgumentType] - numbers by name
    finally:
        await executor.stop(1.0)


def chain(*rows: tuple[int, int, int]) -> PackedTable:
    """A table of (sequence, first position, count)."""
    sequences, firsts, counts = zip(*rows, strict=True)
    return PackedTable(sequences, firsts, counts)
