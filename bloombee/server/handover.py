"""Handing a session over to the server that takes its place.

The session takes no further step here from the moment it is fetched. Its pages are
copied out of the pool in batches of about a mebibyte, each a call on the compute
thread between two passes, so that the sessions which are still here go on.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from bloombee import compression
from bloombee.core import SessionId, Span
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    PeerStopping,
    RequestError,
    StaleEpoch,
    TransportError,
)
from bloombee.kv.interface import KVPool, KVShape
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import Fetch, HandedOver, Output, Pages, WireDtype
from bloombee.server.admission import Admission
from bloombee.server.carried import Carried, Terms
from bloombee.server.executor import Executor
from bloombee.server.holdings import carried_terms
from bloombee.server.pieces import PIECE_BYTES, Piece, batches, kv_pieces, row_pieces
from bloombee.server.sessions import Session, Sessions
from bloombee.swarm.connection import Connection
from bloombee.telemetry import Registry

logger = logging.getLogger(__name__)

SEND_S = 30.0
"""For the other side to take one page."""
BACK_S = 3.0
"""For a parked session's KV to come back into the pool."""
QUIET_S = 30.0
"""For the steps that the session had taken to be computed."""


@dataclass(frozen=True, slots=True)
class Handed:
    """One page and its bytes, or the tokens of one step."""

    page: Pages | Output
    body: compression.Buffer


class Pieces:
    """All pages of one session, in the order in which they travel."""

    def __init__(
        self, terms: Terms, carried: Carried, shape: KVShape, most_bytes: int = PIECE_BYTES
    ) -> None:
        self._terms = terms
        self._carried = carried
        self._kv_dtype: WireDtype = cast("WireDtype", compression.wire_dtype(shape.dtype))
        token_bytes = shape.block_token_bytes
        row_bytes = compression.row_bytes(terms.hidden_size, terms.wire_dtype)
        journal = [len(rows) for rows in carried.journal or ()]
        outputs = [len(rows) for _, rows in carried.outputs]
        self.kv = list(kv_pieces(carried.lengths, terms.span, token_bytes, most_bytes))
        self.rows = [
            *row_pieces("journal", journal, row_bytes, most_bytes),
            *row_pieces("output", outputs, row_bytes, most_bytes),
        ]
        self.total_bytes = sum(piece.count_bytes for piece in (*self.kv, *self.rows))

    @property
    def book(self) -> HandedOver:
        """What is said after the last page."""
        carried = self._carried
        return HandedOver(
            session=self._terms.session,
            lengths=carried.lengths,
            newest_steps=carried.newest_steps,
            released=carried.released,
            included=carried.included,
            outputs=tuple(step for step, _ in carried.outputs),
            sampling=carried.sampling,
        )

    def export(self, batch: list[Piece], pool: KVPool) -> list[Handed]:
        """Copies of keys and values, on the host; for the compute thread."""
        return [self._page(piece, self._exported(pool, piece), self._kv_dtype) for piece in batch]

    def row_pages(self) -> Iterator[Handed]:
        """Journal and outputs."""
        for piece in self.rows:
            part = slice(piece.first, piece.first + piece.count)
            if piece.kind == "journal" and self._carried.journal is not None:
                rows = self._carried.journal[piece.sequence]
            else:
                rows = self._carried.outputs[piece.sequence][1]
            yield self._page(piece, rows[part], self._terms.wire_dtype)

    def _exported(self, pool: KVPool, piece: Piece) -> torch.Tensor:
        stop = piece.first + piece.count
        pair = pool.export(self._terms.session, piece.sequence, piece.block, piece.first, stop)
        return torch.stack(pair).flatten(2).flatten(0, 1).cpu()  # [2 * N, K * E]

    def _page(self, piece: Piece, matrix: torch.Tensor, dtype: WireDtype) -> Handed:
        page = Pages(
            session=self._terms.session,
            kind=piece.kind,
            sequence=piece.sequence,
            block=piece.block,
            first=piece.first,
            count=piece.count,
            dtype=dtype,
            total_bytes=self.total_bytes,
            whole=piece.whole,
        )
        return Handed(page, compression.encode(matrix)[1])


class HandOvers:
    """Serves Fetch requests."""

    piece_bytes = PIECE_BYTES

    def __init__(
        self, sessions: Sessions, admission: Admission, executor: Executor, telemetry: Registry
    ) -> None:
        self._sessions = sessions
        self._admission = admission
        self._executor = executor
        self._handed = telemetry.counter("handed_over_sessions")
        self._handed_bytes = telemetry.counter("handed_over_bytes")

    async def serve(self, peer: Connection, request: Fetch) -> None:
        """Halt the session and send what it holds, pages first; or say what stands in the way.

        Raises TransportError when `peer` is gone or too slow.
        """
        try:
            session = self._find(request)
            halted = PeerStopping("the session is being handed over")
            async with asyncio.timeout(QUIET_S):
                await session.halt(halted)
            async with self._admission.use(session.id, BACK_S):
                pieces = await self._send_pages(peer, session, request)
            if session.halted is not halted or session.epoch != request.epoch:
                raise StaleEpoch(f"the session has moved on to epoch {session.epoch}")
        except TimeoutError:
            raise TransportError(f"a step of the session took more than {QUIET_S:g} s") from None
        except TransportError:
            raise
        except BloomBeeError as error:
            logger.info("handed no session over to %s: %s", peer.remote, error)
            told = SessionId(request.session)
            await peer.send(to_message(error, session=told, epoch=request.epoch))
        else:
            self._handed.add()
            self._handed_bytes.add(pieces.total_bytes)
            await peer.send(pieces.book)

    def _find(self, request: Fetch) -> Session:
        """The session that is asked for; raises what is wrong with the request."""
        session = self._sessions.find(SessionId(request.session))
        if session is None or not hmac.compare_digest(request.secret, session.secret):
            # One answer for both: strangers learn nothing of what is held here.
            raise AuthError("no session that this secret opens is held here")
        if request.epoch != session.epoch:
            raise StaleEpoch(f"epoch {request.epoch} is asked for, it is in {session.epoch}")
        span = session.context.terms.span
        if not (span.start <= request.start < request.end == span.end):
            # What was sent on from the middle of a span is in no journal.
            raise RequestError(
                f"blocks {request.start}:{request.end} of a session of {span}: only what "
                f"ends at {span.end} can be handed over"
            )
        if session.held.broken or not session.holds:
            raise RequestError(session.held.broken or "the session is not open yet")
        return session

    async def _send_pages(self, peer: Connection, session: Session, request: Fetch) -> Pieces:
        if session.held.broken:
            raise RequestError(session.held.broken)
        terms = replace(
            carried_terms(session.id, session.context, session.wire_dtype),
            span=Span(request.start, request.end),
        )
        carried = session.held.carry()
        shape, lengths = await self._executor.call(
            lambda pool: (pool.shape, pool.lengths(terms.session))
        )
        if lengths != carried.lengths:
            raise RequestError(f"the session holds {lengths} tokens here, its book says otherwise")
        pieces = Pieces(terms, carried, shape, self.piece_bytes)
        for batch in batches(pieces.kv, self.piece_bytes):
            for handed in await self._executor.call(partial(pieces.export, batch)):
                await _send_page(peer, handed)
        for handed in pieces.row_pages():
            await _send_page(peer, handed)
        for step, tokens in carried.tokens:
            output = tokens.output(session.id, session.epoch, step)
            await _send_page(peer, Handed(output, tokens.body))
        return pieces


async def _send_page(peer: Connection, handed: Handed) -> None:
    try:
        async with asyncio.timeout(SEND_S):
            await peer.send(handed.page, handed.body)
    except TimeoutError:
        raise TransportError(f"{peer.remote} took no page for {SEND_S:g} s") from None
