"""Sessions that give up their place to those that wait, and lose nothing.

When requests for KV wait, the KV of the session that has been idle longest moves to
host memory, no larger than what it holds, and its pages go to whoever waits. Its
next step reserves anew and loads the same bits back (`admission`). Both ways go in
pieces: each is one short job of the compute thread, and steps of others run between
them. A session that is used meanwhile simply stays: reading its pages changed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from bloombee.core import PeerId, SessionId, Span
from bloombee.errors import RequestError
from bloombee.kv.interface import KVPool, KVShape
from bloombee.server.executor import Executor
from bloombee.server.pieces import Piece, batches, kv_pieces

JOB_BYTES = 2 << 20
"""KV copied in one job of the compute thread: 0.9 ms of it each way on our test machine."""


@dataclass(slots=True, eq=False)
class Holding:
    """One session's claim on KV. `uses` counts its steps that wait or run.

    `begun` counts all uses there were, so that a use in between shows. `saved` is what
    it held when it was parked; `size_bytes` what that takes, once known.
    """

    peer: PeerId
    session: SessionId
    sequences: int
    max_length: int
    pages_each: int
    span: Span | None = None
    released: set[int] = field(default_factory=set[int])
    uses: int = 0
    begun: int = 0
    idle_since_s: float = 0.0
    closed: bool = False
    size_bytes: int = 0
    saved: SavedKV | None = None
    returning: asyncio.Lock = field(default_factory=asyncio.Lock)

    def has(self, sequences: int, max_length: int) -> bool:
        """Whether these are its terms."""
        return (self.sequences, self.max_length) == (sequences, max_length)

    @property
    def pages(self) -> int:
        """Pages that it reserves in the pool, or would."""
        return self.pages_each * (self.sequences - len(self.released))


class SavedKV:
    """What a session's sequences hold on `span`, in host memory.

    `save`, `expect` and `load` are for the compute thread.
    """

    def __init__(self, shape: KVShape, span: Span, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._shape = shape
        self._span = span
        self._token_bytes = shape.block_token_bytes
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # [2, N, K, E]: keys, values

    @property
    def total_bytes(self) -> int:
        """Host memory that all of it takes."""
        return sum(self.lengths) * len(self._span) * self._token_bytes

    def jobs(self) -> list[list[Piece]]:
        """All pieces, by sequence, block and position, in jobs of about JOB_BYTES."""
        pieces = kv_pieces(self.lengths, self._span, self._token_bytes, JOB_BYTES)
        return list(batches(pieces, JOB_BYTES))

    def save(self, session: SessionId, job: Sequence[Piece], pool: KVPool) -> None:
        """Copy these pieces out of the pool. Raises RequestError when they aren't held."""
        for piece in job:
            start, stop = piece.first, piece.first + piece.count
            exported = pool.export(session, piece.sequence, piece.block, start, stop)
            kept = self._kept.get((piece.sequence, piece.block))
            if kept is None:
                size = (2, piece.whole, *exported[0].shape[1:])
                kept = torch.empty(size, dtype=self._shape.dtype)
                self._kept[piece.sequence, piece.block] = kept
            for part, values in zip(kept, exported, strict=True):
                part[start:stop].copy_(values)

    def expect(self, session: SessionId, pool: KVPool) -> None:
        """Announce to the pool what its empty sequences are going to hold."""
        for sequence, length in enumerate(self.lengths):
            if length:
                pool.expect(session, sequence, length, self._span)

    def load(self, session: SessionId, job: Sequence[Piece], pool: KVPool) -> None:
        """Copy these pieces, whose turn it is, back into the pool."""
        for piece in job:
            kept = self._kept[piece.sequence, piece.block]
            part = kept[:, piece.first : piece.first + piece.count]
            keys, values = part.to(self._shape.device)
            pool.load(session, piece.sequence, piece.block, keys, values)


@dataclass(slots=True, eq=False)
class _Export:
    """A session on its way out; `begun` is how often it had been used before."""

    holding: Holding
    begun: int
    saved: SavedKV
    jobs: list[list[Piece]]

    @property
    def undisturbed(self) -> bool:
        """Whether the session still is as it was when the export began."""
        return not self.holding.closed and self.holding.begun == self.begun


class Parking:
    """Parks one session at a time, within `limit_bytes` for all. 0 bytes: parks none.

    `freed` is called whenever the pages of a parked session have become free.
    """

    def __init__(
        self, executor: Executor, shape: KVShape, limit_bytes: int, freed: Callable[[], None]
    ) -> None:
        self._executor = executor
        self._shape = shape
        self._limit_bytes = limit_bytes
        self._freed = freed
        self._export: _Export | None = None
        self.parked = 0
        self.parked_bytes = 0
        self.busy = False

    def fits(self, holding: Holding) -> bool:
        """Whether it may be parked, as far as its size is known."""
        left = self._limit_bytes - self.parked_bytes
        return self._limit_bytes > 0 and holding.saved is None and holding.size_bytes <= left

    def prefers(self, holdings: Sequence[Holding]) -> Holding:
        """The one that is half parked already, or the first."""
        under_way = self._export.holding if self._export is not None else None
        return under_way if under_way in holdings and under_way is not None else holdings[0]

    async def advance(self, holding: Holding) -> None:
        """Do the next piece of parking an idle session. One caller at a time.

        May be cancelled: whoever calls next repeats the piece. Raises PeerStopping
        once the executor has stopped.
        """
        self.busy = True
        try:
            await self._advance(holding)
        except RequestError:
            if not holding.closed:
                raise
            self._export = None
        finally:
            self.busy = False

    async def _advance(self, holding: Holding) -> None:
        export = self._export
        if export is None or export.holding is not holding or not export.undisturbed:
            export = self._export = await self._begin(holding)
            if export is None:
                return
        elif export.jobs:
            job = partial(export.saved.save, holding.session, export.jobs[0])
            await self._executor.call(job)
            del export.jobs[0]
        if not export.undisturbed:
            self.abandon()
        elif not export.jobs:
            await self._finish(export)

    async def _begin(self, holding: Holding) -> _Export | None:
        """Learn how much the session holds; None when that is too much."""
        begun, session = holding.begun, holding.session
        lengths = await self._executor.call(lambda pool: pool.lengths(session))
        saved = SavedKV(self._shape, holding.span or self._shape.span, lengths)
        holding.size_bytes = saved.total_bytes
        return _Export(holding, begun, saved, saved.jobs()) if self.fits(holding) else None

    async def _finish(self, export: _Export) -> None:
        """All is copied: from here on the session is parked, and its pages go."""
        holding, self._export = export.holding, None
        holding.saved = export.saved
        self.parked += 1
        self.parked_bytes += export.saved.total_bytes
        freeing = self._executor.free(holding.session)
        freeing.add_done_callback(lambda _: self._freed())
        await freeing

    def abandon(self) -> None:
        """Forget a copy that was not finished."""
        self._export = None

    async def load_back(self, holding: Holding) -> None:
        """Fill the pages that were reserved anew for a parked session, which it then isn't.

        Raises RequestError when it was closed, PeerStopping. It stays parked then.
        """
        saved = holding.saved
        if saved is None:
            return
        await self._executor.call(partial(saved.expect, holding.session))
        for job in saved.jobs():
            await self._executor.call(partial(saved.load, holding.session, job))
        self.drop(holding)

    def drop(self, holding: Holding) -> None:
        """Forget what is kept of a session."""
        if holding.saved is not None:
            self.parked -= 1
            self.parked_bytes -= holding.saved.total_bytes
            holding.saved = None
