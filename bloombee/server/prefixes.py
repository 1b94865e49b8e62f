"""Prompts that begin alike are computed once: a stage keeps their KV, and begins with it.

Behind each prefill the chunks that it completed are copied to host memory (`keeping`). A
session that opens with a prompt of the same tokens gets copies: the same bits. Chunks are
found only by sessions of the same client, on the same blocks, in the same wire dtype, unless
the operator lets clients share; a client that lies about its tokens then gives others
wrong ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bloombee.core import SessionId, Span
from bloombee.kv.interface import KVPool, KVShape
from bloombee.protocol.messages import ADOPTED_STEP, PREFIX_TOKENS, Chain, Step
from bloombee.server.admission import Done
from bloombee.server.executor import Executor
from bloombee.server.keeping import Keeper, KeepingParts, chunk_table
from bloombee.server.parking import JOB_BYTES
from bloombee.server.prefix_store import Chunk, PrefixStore
from bloombee.server.sequences import BookState
from bloombee.server.sessions import Session
from bloombee.server.tasks import BackgroundTasks
from bloombee.server.work import Outcome
from bloombee.telemetry import Registry

NAMESPACE_BYTES = 16


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
        parts = self._parts
        keeping = KeepingParts(
            executor=parts.executor, shape=parts.shape, tasks=parts.tasks, store=self.store
        )
        prompts = Keeper(keeping, session, tuple(_keys(self._namespace(session), chains)))
        held, span = session.held, session.context.terms.span
        found = [self.store.find(prompt.keys) for prompt in prompts.each]
        with self.store.use([chunk for chunks in found for chunk in chunks]):
            for sequence, chunks in enumerate(found):
                for job in _loads(session.id, sequence, chunks, span):
                    await parts.executor.call(job)
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
                    held.journal.append(chunk_table(sequence, index), chunk.content.rows)
        held.prompts = prompts

    def _namespace(self, session: Session) -> bytes:
        """Differs wherever KV or rows of the same tokens do, or may not be shared."""
        owner = "" if self._parts.shared else session.owner
        parts = (owner, str(session.context.terms.span), session.wire_dtype, str(session.is_last))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=NAMESPACE_BYTES).digest()

    # Keeping -----------------------------------------------------------------------------

    def begin_step(self, session: Session, step: Step, done: Done) -> Done:
        """A new step was taken; returns what the compute thread is to call in place of `done`."""
        held, keeper = session.held, session.held.prompts
        if not isinstance(keeper, Keeper):
            return done
        adopted = keeper.taken(step)
        self._saved.add(sum(adopted))
        self._hits.add(sum(map(bool, adopted)))

        def computed(outcome: Outcome) -> None:
            done(outcome)
            if held.prompts is not keeper:
                return
            if outcome.error is not None or keeper.is_done:
                held.prompts = None
                return
            keeper.computed(step)
            keeper.keep()

        return computed


def _keys(namespace: bytes, chains: Sequence[Chain]) -> Iterator[tuple[bytes, ...]]:
    for chain in chains:
        yield tuple(namespace + each for each in chain)


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
