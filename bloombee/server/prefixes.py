"""Prompts that begin alike are computed once: a stage keeps their KV, and begins with it.

Behind each prefill the chunks that it completed are copied to host memory, one short job
of the compute thread after the other. A session that opens with a prompt of the same
tokens gets copies: the same bits. Chunks are found only by sessions of the same client, on
the same blocks, in the same wire dtype, unless the operator lets clients share; a client that
lies about its tokens then gives others wrong ones.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import BloomBeeError
from bloombee.kv.interface import KVPool
from bloombee.protocol.messages import ADOPTED_STEP, PREFIX_TOKENS, Chain, Step
from bloombee.server.admission import Done
from bloombee.server.executor import Executor
from bloombee.server.parking import JOB_BYTES
from bloombee.server.prefix_store import Chunk, Content, PrefixStore
from bloombee.server.prompts import Prompt, Prompts
from bloombee.server.sequences import BookState
from bloombee.server.sessions import Session
from bloombee.server.tasks import BackgroundTasks
from bloombee.server.work import Outcome
from bloombee.telemetry import Registry

logger = logging.getLogger(__name__)

NAMESPACE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixParts:
    """What keeping prompts takes. `limit_bytes` 0: keep none."""

    executor: Executor
    tasks: BackgroundTasks
    telemetry: Registry
    limit_bytes: int
    shared: bool = False


class Prefixes:
    """Keeps prompts of one stage, and gives them to sessions that open. On the event loop."""

    def __init__(self, parts: PrefixParts) -> None:
        self.store = PrefixStore(parts.limit_bytes)
        self._parts = parts
        self._hits = parts.telemetry.counter("prefix_hits")
        self._saved = parts.telemetry.counter("prefix_tokens_saved")

    @property
    def hits(self) -> int:
        """Sequences that began with something that was kept."""
        return self._hits.value

    @property
    def tokens_saved(self) -> int:
        """Tokens that sequences did not have to compute for that."""
        return self._saved.value

    # Beginning with what was kept ------------------------------------------------------

    async def adopt(self, session: Session, chains: Sequence[Chain]) -> None:
        """Fill the reserved, empty sequences of a new session with what is kept of its prompts.

        Its KV stays in the pool meanwhile. Raises RequestError when the session was
        freed, PeerStopping.
        """
        if not self.store.limit_bytes:
            return
        prompts = Prompts(tuple(_keys(self._namespace(session), chains)))
        held, span = session.held, session.context.terms.span
        found = [self.store.find(prompt.keys) for prompt in prompts.each]
        with self.store.use([chunk for chunks in found for chunk in chunks]):
            for sequence, chunks in enumerate(found):
                for job in _loads(session.id, sequence, chunks, span):
                    await self._parts.executor.call(job)
        lengths = tuple(len(chunks) * PREFIX_TOKENS for chunks in found)
        held.book.restore(
            BookState(
                lengths=lengths,
                newest_steps=tuple(ADOPTED_STEP if length else 0 for length in lengths),
                released=(False,) * len(lengths),
            )
        )
        for sequence, chunks in enumerate(found):
            for index, chunk in enumerate(chunks):
                if held.journal is not None and chunk.content.rows is not None:
                    held.journal.append(_table(sequence, index), chunk.content.rows)
        held.prompts = prompts

    def _namespace(self, session: Session) -> bytes:
        """Differs wherever KV or rows of the same tokens do, or may not be shared."""
        owner = "" if self._parts.shared else session.owner
        parts = (owner, str(session.context.terms.span), session.wire_dtype, str(session.is_last))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=NAMESPACE_BYTES).digest()

    # Keeping -----------------------------------------------------------------------------

    def begin_step(self, session: Session, step: Step, done: Done) -> Done:
        """A new step was taken; returns what the compute thread is to call in place of `done`."""
        held, prompts = session.held, session.held.prompts
        if prompts is None:
            return done
        adopted = prompts.taken(step)
        self._saved.add(sum(adopted))
        self._hits.add(sum(map(bool, adopted)))

        def computed(outcome: Outcome) -> None:
            done(outcome)
            if held.prompts is not prompts:
                return
            if outcome.error is not None or prompts.is_over:
                held.prompts = None
                return
            prompts.computed(step)
            if not prompts.busy and prompts.ready() is not None:
                prompts.busy = True
                keeping = self._keep(session, prompts)
                session.keep_task(self._parts.tasks.start(keeping, "keeping a prompt"))

        return computed

    async def _keep(self, session: Session, prompts: Prompts) -> None:
        """Keep what is ready, chunk by chunk, until there is no more of it."""
        try:
            while (found := prompts.ready()) is not None:
                sequence, prompt = found
                if not await self._keep_next(session, prompts, sequence, prompt):
                    prompt.sure = 0
                prompt.looked += 1
        except BloomBeeError as error:
            logger.debug("a prompt of %s is not kept: %s", session.owner, error)
        finally:
            prompts.busy = False

    async def _keep_next(
        self, session: Session, prompts: Prompts, sequence: int, prompt: Prompt
    ) -> bool:
        """Keep the next chunk of one sequence; False when nothing can follow it.

        Raises RequestError when the session was closed, or its KV isn't in the pool.
        """
        index, store = prompt.looked, self.store
        parent = store.get(prompt.keys[index - 1]) if index else None
        if index and parent is None:
            return False
        if (chunk := store.get(prompt.keys[index])) is not None:
            store.touch(chunk)
            return chunk.parent is parent
        span, table = session.context.terms.span, _table(sequence, index)
        with store.use(() if parent is None else (parent,)):
            kv = await self._copy(session.id, table, span)
        is_sure = (index + 1) * PREFIX_TOKENS <= prompt.sure
        if session.held.prompts is not prompts or not is_sure:
            return False  # by now it may hold something else
        rows = None if session.held.journal is None else session.held.journal.rows(table).clone()
        return store.put(prompt.keys[index], parent, Content(kv, rows)) is not None

    async def _copy(self, session: SessionId, table: PackedTable, span: Span) -> torch.Tensor:
        """KV of the tokens of `table` in host memory, `[L, 2, N, K, E]`."""
        copy: torch.Tensor | None = None
        first = span.start
        while copy is None or first < span.end:
            job = partial(_export, session, table, span, first, copy)
            first, copy = await self._parts.executor.call(job)
        return copy


def _keys(namespace: bytes, chains: Sequence[Chain]) -> Iterator[tuple[bytes, ...]]:
    for chain in chains:
        yield tuple(namespace + each for each in chain)


def _table(sequence: int, index: int) -> PackedTable:
    """The tokens of one chunk."""
    return PackedTable((sequence,), (index * PREFIX_TOKENS,), (PREFIX_TOKENS,))


def _export(
    session: SessionId,
    table: PackedTable,
    span: Span,
    first: int,
    copy: torch.Tensor | None,
    pool: KVPool,
) -> tuple[int, torch.Tensor]:
    """Copy blocks from `first` on, as many as one job may; the block that is next then."""
    shape, start, count = pool.shape, table.first_positions[0], table.counts[0]
    if copy is None:
        size = (len(span), 2, count, shape.kv_heads, shape.head_size)
        copy = torch.empty(size, dtype=shape.dtype, pin_memory=shape.device.type == "cuda")
    stop = min(span.end, first + max(1, JOB_BYTES // (shape.block_token_bytes * count)))
    for block in range(first, stop):
        exported = pool.export(session, table.sequences[0], block, start, start + count)
        for part, values in zip(copy[block - span.start], exported, strict=True):
            part.copy_(values)
    return stop, copy


def _loads(
    session: SessionId, sequence: int, chunks: Sequence[Chunk], span: Span
) -> Iterator[Callable[[KVPool], None]]:
    """Jobs for the compute thread that fill an empty sequence with `chunks`."""
    if not chunks:
        return
    yield lambda pool: pool.expect(session, sequence, len(chunks) * PREFIX_TOKENS, span)
    job: list[tuple[int, torch.Tensor]] = []
    size = 0
    for chunk in chunks:
        for layer, kv in enumerate(chunk.content.kv):
            job.append((span.start + layer, kv))
            size += kv.nbytes
            if size >= JOB_BYTES:
                yield partial(_load, session, sequence, job)
                job, size = [], 0
    if job:
        yield partial(_load, session, sequence, job)


def _load(
    session: SessionId, sequence: int, pieces: Sequence[tuple[int, torch.Tensor]], pool: KVPool
) -> None:
    device = pool.shape.device
    for block, kv in pieces:
        key, value = kv.to(device, non_blocking=True)
        pool.load(session, sequence, block, key, value)
