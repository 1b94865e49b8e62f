"""What passes cost on this machine, measured through the compute thread before it serves.

Steps like those of sessions go through the executor, so that the table holds what the swarm
will see: the queue, the copy to the host, a paced device. KV of a context is loaded, not
computed. One span as a whole gives the time of its blocks; one block alone gives what a pass
costs besides. Each part has its share of the time there is: what is quick is measured first,
and larger sizes only as long as they fit. Of several attempts the quickest counts, which
others on the machine have disturbed least.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from bloombee.core import Phase, Span
from bloombee.kv.interface import KVPool
from bloombee.server.executor import Executor
from bloombee.server.readings import Readings
from bloombee.server.scratch import Scratch, Trial, scratch
from bloombee.server.work import Model
from bloombee.telemetry import Stopwatch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 1024)
CHUNKS = (16, 128, 512)
BEHIND_TOKENS = 128
"""Of the chunk that is measured behind a context."""
ATTEMPTS = 3
SPARE_TOKENS = 8
"""Of a sequence besides its context: more than the attempts at one point add."""
LOADED_BYTES = 256 << 20
"""At most so much KV is written to have a context."""
_Session = AbstractAsyncContextManager[Scratch]
ROWS_SHARE, HEAD_SHARE, CHUNKS_SHARE, CONTEXT_SHARE = 0.3, 0.45, 0.7, 1.0
"""When each part is to be done."""
WARMING = 4
FEW_ROWS = 4
FEW_S = 0.05
"""A pass that takes longer is tried less often."""
LOADED_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far a table may go, in about `seconds`. One row and one chunk come in any case."""

    seconds: float = 2.5
    most_rows: int = 256
    most_chunk: int = 512
    max_length: int = 2048
    has_head: bool = False


class Profiler:
    """Measures one span. Nobody else may use the executor meanwhile."""

    def __init__(self, executor: Executor, model: Model, pool: KVPool, extent: Extent) -> None:
        self._executor = executor
        self._model = model
        self._pool = pool
        self._extent = extent
        self._watch = Stopwatch()
        self._readings = Readings(blocks=len(model.span))

    async def run(self) -> Readings:
        """Everything; the pool is afterwards as before.

        Raises KVFull when not even a few tokens are free, and what a failing pass raises.
        """
        self._watch = Stopwatch()
        self._readings = Readings(blocks=len(self._model.span))
        async with self._session(max(1, self._rows_with(0)), 0) as session:
            await _point(session, Trial(), WARMING)
            await self._rows(session)
            await self._single_block(session)
            if self._extent.has_head:
                await self._head(session)
        await self._chunks()
        for context in CONTEXTS:
            await self._with_context(context)
        return self._readings

    @property
    def blocks(self) -> int:
        """Of the span."""
        return len(self._model.span)

    async def one_row(self) -> float:
        """Seconds of a row through all blocks; a fraction of a second to measure. As `run`."""
        async with self._session(1, 0) as session:
            return await _point(session, Trial(), WARMING)

    def _session(self, sequences: int, context: int, spare: int = SPARE_TOKENS) -> _Session:
        return scratch(
            self._executor, self._model, sequences=sequences, context=context, spare=spare
        )

    async def _rows(self, session: Scratch) -> None:
        most = max(1, self._rows_with(0))
        for rows in (each for each in ROWS if each <= most):
            before_s = self._readings.decode.get((rows // 2, 0), 0.0)
            if rows > 1 and not self._allows(ROWS_SHARE, 1.5 * (1 + ATTEMPTS) * before_s):
                return
            self._readings.decode[rows, 0] = await _point(session, Trial(rows=rows))

    async def _single_block(self, session: Scratch) -> None:
        first = self._model.span.start
        trial = Trial(span=Span(first, first + 1))
        self._readings.single_s = await _point(session, trial)

    async def _head(self, session: Scratch) -> None:
        """The same passes with a token chosen for each row: of one row, of most, then others."""
        one, *others = sorted(rows for rows, _ in self._readings.decode)
        for rows in (one, *reversed(others)):
            without_s = self._readings.decode[rows, 0]
            known = len(self._readings.head)
            if known and not self._allows(HEAD_SHARE, 1.5 * (1 + ATTEMPTS) * without_s):
                continue
            if rows <= FEW_ROWS:  # against what disturbed the first passes
                without_s = min(without_s, await _point(session, Trial(rows=rows)))
                self._readings.decode[rows, 0] = without_s
            with_s = await _point(session, Trial(rows=rows, chooses=True))
            self._readings.head[rows] = max(0.0, with_s - without_s)

    async def _with_context(self, context: int) -> None:
        """Of as many sequences of that length as there is room and time for, and of one."""
        readings, room = self._readings, self._rows_with(context)
        load_s = context * self._pool.shape.bytes_per_token / LOADED_BYTES_PER_S

        def cost_s(rows: int) -> float:
            return rows * load_s + 2 * (2 + ATTEMPTS) * readings.decode[rows, 0]

        fitting = [
            rows
            for rows, kept in readings.decode
            if not kept and rows <= room and self._allows(CONTEXT_SHARE, cost_s(rows))
        ]
        if not fitting:
            return
        most = max(fitting)
        async with self._session(most, context) as session:
            for rows in sorted({1, most}):
                readings.decode[rows, context] = await _point(session, Trial(rows=rows))

    async def _chunks(self) -> None:
        """Prompts of several lengths, and one behind a long context."""
        room = min(self._extent.max_length, self._pool.total_tokens)
        most, readings = min(self._extent.most_chunk, room // 2), self._readings
        counts = sorted({max(1, min(each, most)) for each in CHUNKS})
        async with self._session(1, 0, 2 * counts[-1]) as session:
            for count in counts:
                before_s = max(readings.chunks.values(), default=0.0)
                if not readings.chunks or self._allows(CHUNKS_SHARE, 8 * before_s):
                    trial = Trial(count=count, phase=Phase.PREFILL)
                    readings.chunks[count, count / 2] = await _point(session, trial, 1)
        count = max(each for each, _ in readings.chunks if each <= BEHIND_TOKENS)
        far = [c for c in CONTEXTS if c + 2 * count <= room]
        if not far or not self._allows(CHUNKS_SHARE, 3 * readings.chunks[count, count / 2]):
            return
        async with self._session(1, far[-1], 2 * count) as session:
            seconds = await _point(session, Trial(count=count, phase=Phase.PREFILL), 1)
            readings.chunks[count, far[-1] + count / 2] = seconds

    def _allows(self, share: float, cost_s: float) -> bool:
        """Whether something that takes `cost_s` ends before `share` of the time is over."""
        return self._watch.elapsed_s + cost_s < self._extent.seconds * share

    def _rows_with(self, context: int) -> int:
        """How many sequences of so many tokens there is room for."""
        length, page = context + SPARE_TOKENS, self._pool.page_tokens
        if context and length > self._extent.max_length:
            return 0
        rows = min(self._extent.most_rows, self._pool.total_tokens // (-(-length // page) * page))
        if context:
            each = context * self._pool.shape.bytes_per_token
            rows = min(rows, max(1, LOADED_BYTES // each))
        return rows


async def _point(session: Scratch, trial: Trial, attempts: int = ATTEMPTS) -> float:
    """The quickest of several passes; the first, which makes room in caches, counts if alone."""
    seconds = await session.seconds(trial)
    for attempt in range(attempts if seconds < FEW_S else min(attempts, 1)):
        again = await session.seconds(trial)
        seconds = min(seconds, again) if attempt else again
    await session.reset(trial.rows)
    return seconds
