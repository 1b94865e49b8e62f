"""Copying the prompts of one session to the store, while the session goes on, or ends.

What a step completes is queued for the compute thread at once, up to a few milliseconds of
copying, so that it comes before whatever ends the session. A copy counts only if its
sequence was not cut, copied over or started anew meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import BloomBeeError
from bloombee.kv.interface import KVPool, KVShape
from bloombee.protocol.messages import PREFIX_TOKENS
from bloombee.server.executor import Executor
from bloombee.server.parking import JOB_BYTES
from bloombee.server.prefix_store import Content, PrefixStore
from bloombee.server.prompts import Prompt, Prompts
from bloombee.server.sessions import Session
from bloombee.server.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

COPY_BYTES = 2 * JOB_BYTES
"""Copied in one job of the compute thread."""
QUEUED_BYTES = 2 * COPY_BYTES
"""Queued at a time of one session: what two parts of a prompt complete of a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingParts:
    """What copying takes: the compute thread, its pool's shape, and where copies go."""

    executor: Executor
    shape: KVShape
    tasks: BackgroundTasks
    store: PrefixStore


class Keeper(Prompts):
    """Keeps the prompts of one session. On the event loop."""

    def __init__(
        self, parts: KeepingParts, session: Session, keys: Sequence[Sequence[bytes]]
    ) -> None:
        super().__init__(keys)
        self._parts = parts
        self._session = session
        self._held = session.held
        self._span = session.context.terms.span
        self._queue: deque[_Queued] = deque()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to keep, and nothing on its way."""
        return self.is_over and not self._queue

    def keep(self) -> None:
        """Have what is ready copied, as much of it as may be queued."""
        collecting = bool(self._queue)
        self._fill()
        if self._queue and not collecting:
            # Not of the session: what is queued by now is kept even if it ends.
            self._parts.tasks.start(self._collect(), "keeping a prompt")

    def _fill(self) -> None:
        while self._enqueue():
            pass

    def _enqueue(self) -> bool:
        """Queue one more copy, if anything is ready and there is room."""
        chunk_bytes = len(self._span) * PREFIX_TOKENS * self._parts.shape.block_token_bytes
        queued_bytes = sum(len(each.copy.chunks) for each in self._queue) * chunk_bytes
        if queued_bytes >= QUEUED_BYTES:
            return False
        while (found := self.ready()) is not None:
            sequence, prompt = found
            self._pass_held(prompt)
            count = min(prompt.ready, max(1, COPY_BYTES // chunk_bytes))
            if count:
                chunks = range(prompt.looked, prompt.looked + count)
                copy = Copy(self._parts.shape, self._span, sequence, chunks)
                job = self._parts.executor.ask(partial(copy.advance, self._session.id))
                self._queue.append(_Queued(prompt, copy, job))
                prompt.looked += count
                return True
        return False

    def _pass_held(self, prompt: Prompt) -> None:
        """Don't copy what is kept already; that it is asked for again keeps it longer."""
        while prompt.ready:
            chunk = self._parts.store.get(prompt.keys[prompt.looked])
            if chunk is None:
                return
            self._parts.store.touch(chunk)
            prompt.looked += 1

    async def _collect(self) -> None:
        """Keep what was queued, and queue more, until there is nothing left."""
        while self._queue:
            queued = self._queue[0]
            try:
                kept = await self._collect_one(queued)
            except BloomBeeError as error:
                logger.debug("a prompt of %s is not kept: %s", self._session.owner, error)
                kept = False
            self._queue.popleft()
            if not kept:
                queued.prompt.sure = 0
            self._fill()

    async def _collect_one(self, queued: _Queued) -> bool:
        """Whether all of it is kept. Raises RequestError when the session was closed first."""
        copy, prompt, store = queued.copy, queued.prompt, self._parts.store
        await queued.job
        while not copy.is_whole:
            await self._parts.executor.call(partial(copy.advance, self._session.id))
        is_sure = copy.chunks.stop * PREFIX_TOKENS <= prompt.sure
        if not is_sure or self._session.held is not self._held or self._held.prompts is not self:
            return False
        journal = self._held.journal
        for index, kv in zip(copy.chunks, copy.kv, strict=True):
            parent = store.get(prompt.keys[index - 1]) if index else None
            if index and parent is None:
                return False
            table = chunk_table(copy.sequence, index)
            rows = None if journal is None else journal.rows(table).clone()
            if store.put(prompt.keys[index], parent, Content(kv, rows)) is None:
                return False
        return True


class Copy:
    """KV of some `chunks` of one sequence on its way to host memory, each by itself."""

    def __init__(self, shape: KVShape, span: Span, sequence: int, chunks: range) -> None:
        self.chunks = chunks
        self.sequence = sequence
        self.kv: list[Float[torch.Tensor, "L 2 N K E"]] = []
        self._shape = shape
        self._span = span
        self._block = span.start

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are copied."""
        return self._block == self._span.end

    def advance(self, session: SessionId, pool: KVPool) -> None:
        """Copy some more blocks; for the compute thread. Raises RequestError."""
        shape, chunks = self._shape, self.chunks
        if not self.kv:
            size = (len(self._span), 2, PREFIX_TOKENS, shape.kv_heads, shape.head_size)
            pinned = shape.device.type == "cuda"
            self.kv = [torch.empty(size, dtype=shape.dtype, pin_memory=pinned) for _ in chunks]
        first, stop = chunks.start * PREFIX_TOKENS, chunks.stop * PREFIX_TOKENS
        count = max(1, COPY_BYTES // (shape.block_token_bytes * (stop - first)))
        for block in range(self._block, min(self._span.end, self._block + count)):
            exported = pool.export(session, self.sequence, block, first, stop)
            for part, values in enumerate(exported):
                for kv, chunk in zip(self.kv, values.split(PREFIX_TOKENS), strict=True):
                    kv[block - self._span.start, part].copy_(chunk)
            self._block = block + 1


@dataclass(slots=True, eq=False)
class _Queued:
    """A copy whose first job is queued."""

    prompt: Prompt
    copy: Copy
    job: asyncio.Future[None]


def chunk_table(sequence: int, index: int) -> PackedTable:
    """The tokens of one chunk."""
    return PackedTable((sequence,), (index * PREFIX_TOKENS,), (PREFIX_TOKENS,))
