"""Prompts that begin alike are computed once: a stage keeps their KV, and begins with it.

Behind each prefill the chunks that it completed are copied to host memory, in short jobs
of the compute thread. A session that opens with a prompt of the same
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
from jaxtyping import Float

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import BloomBeeError
from bloombee.kv.interface import KVPool, KVShape
from bloombee.protocol.messages import ADOPTED_STEP, PREFIX_TOKENS, Chain, Step
from bloombee.server.admission import Done
from bloombee.server.executor import Executor
from bloombee.server.journal import Journal
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
COPY_BYTES = 2 * JOB_BYTES
"""Of one job; what a part of a prompt completes is often one, done before its session can end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixParts:
    """What keeping prompts takes. `limit_bytes` 0: keep none."""

    executor: Executor
    shape: KVShape
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
                # Not of the session: what is queued by now is copied even if it ends.
                self._parts.tasks.start(self._keep(session, prompts), "keeping a prompt")

        return computed

    async def _keep(self, session: Session, prompts: Prompts) -> None:
        """Keep what is ready, until there is no more of it, or it may be something else."""
        try:
            while session.held.prompts is prompts and (found := prompts.ready()) is not None:
                sequence, prompt = found
                if not await self._keep_some(session, sequence, prompt):
                    prompt.sure = 0
        except BloomBeeError as error:
            logger.debug("a prompt of %s is not kept: %s", session.owner, error)
        finally:
            prompts.busy = False

    async def _keep_some(self, session: Session, sequence: int, prompt: Prompt) -> bool:
        """Keep the next chunks of one sequence; False when nothing can follow them.

        Raises RequestError when the session was closed, or its KV isn't in the pool.
        """
        parent = self._look(prompt)
        if prompt.looked and parent is None:
            return False
        shape, held = self._parts.shape, session.held
        span, prompts = session.context.terms.span, held.prompts
        chunk_bytes = len(span) * PREFIX_TOKENS * shape.block_token_bytes
        count = min(prompt.ready, max(1, COPY_BYTES // chunk_bytes))
        if not count:
            return True
        copy = Copy(shape, span, sequence, range(prompt.looked, prompt.looked + count))
        with self.store.use(() if parent is None else (parent,)):
            while not copy.is_whole:
                await self._parts.executor.call(partial(copy.advance, session.id))
        if session.held is not held or held.prompts is not prompts or prompt.ready < count:
            return False  # by now it may hold something else
        for index, kv in zip(copy.chunks, copy.kv, strict=True):
            content = Content(
                kv, None if held.journal is None else _rows(held.journal, copy, index)
            )
            parent = self.store.put(prompt.keys[index], parent, content)
            if parent is None:
                return False
            prompt.looked += 1
        return True

    def _look(self, prompt: Prompt) -> Chunk | None:
        """Pass what is held already; the chunk that the next one follows."""
        parent = self.store.get(prompt.keys[prompt.looked - 1]) if prompt.looked else None
        while prompt.ready:
            chunk = self.store.get(prompt.keys[prompt.looked])
            if chunk is None or chunk.parent is not parent:
                break
            parent = chunk
            prompt.looked += 1
        if parent is not None:
            self.store.touch(parent)
        return parent


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


def _rows(journal: Journal, copy: Copy, index: int) -> Float[torch.Tensor, "N D"]:
    """Those of one chunk, in memory of their own."""
    return journal.rows(_table(copy.sequence, index)).clone()


def _keys(namespace: bytes, chains: Sequence[Chain]) -> Iterator[tuple[bytes, ...]]:
    for chain in chains:
        yield tuple(namespace + each for each in chain)


def _table(sequence: int, index: int) -> PackedTable:
    """The tokens of one chunk."""
    return PackedTable((sequence,), (index * PREFIX_TOKENS,), (PREFIX_TOKENS,))


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
