"""Handing a session over to the server that takes its place.

The session takes no further step here from the moment it is fetched. Its pages are
copied out of the pool in batches of about a mebibyte, each a call on the compute
thread between two passes, so that the sessions which are still here go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch

from bloombee import compression
from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, RequestError, TransportError
from bloombee.kv.interface import KVPool, KVShape
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import Fetch, HandedOver, Pages, WireDtype
from bloombee.server.carried import Carried, Terms
from bloombee.server.executor import Executor
from bloombee.server.pieces import PIECE_BYTES, Piece, batches, kv_pieces, row_pieces
from bloombee.swarm.connection import Connection
from bloombee.telemetry import Registry

logger = logging.getLogger(__name__)

SEND_S = 30.0
"""For the other side to take one page."""


@dataclass(frozen=True, slots=True)
class Handed:
    """One page and its bytes."""

    page: Pages
    body: compression.Buffer


class Pieces:
    """All pages of one session, in the order in which they travel."""

    def __init__(
        self, terms: Terms, carried: Carried, shape: KVShape, most_bytes: int = PIECE_BYTES
    ) -> None:
        self._terms = terms
        self._carried = carried
        self._kv_dtype: WireDtype = cast("WireDtype", compression.wire_dtype(shape.dtype))
        token_bytes = 2 * shape.kv_heads * shape.head_size * shape.dtype.itemsize
        row_bytes = terms.hidden_size * compression.torch_dtype(terms.wire_dtype).itemsize
        journal = [len(rows) for rows in carried.journal or ()]
        outputs = [len(rows) for _, rows in carried.outputs]
        self.kv = list(kv_pieces(carried.lengths, terms.span, token_bytes, most_bytes))
        self.rows = [
            *row_pieces("journal", journal, row_bytes, most_bytes),
            *row_pieces("output", outputs, row_bytes, most_bytes),
        ]
        self.total_bytes = sum(piece.count_bytes for piece in (*self.kv, *self.rows))

    def export(self, pool: KVPool, batch: list[Piece]) -> list[Handed]:
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


@dataclass(frozen=True, slots=True)
class Quiet:
    """A session that takes no further step: its terms for what was asked, and its state."""

    terms: Terms
    carried: Carried


class HandOvers:
    """Serves Fetch requests.

    `quiet` checks a request, has the session finish what it has taken and take no more,
    and says what it is then; it raises what is wrong with the request.
    """

    def __init__(
        self,
        executor: Executor,
        quiet: Callable[[Fetch], Awaitable[Quiet]],
        telemetry: Registry,
    ) -> None:
        self._executor = executor
        self._quiet = quiet
        self._handed = telemetry.counter("handed_over_sessions")
        self._handed_bytes = telemetry.counter("handed_over_bytes")

    async def serve(self, peer: Connection, request: Fetch) -> None:
        """Send all pages, then the book; or say what stands in the way.

        Raises TransportError when `peer` is gone or too slow.
        """
        session = SessionId(request.session)
        try:
            quiet = await self._quiet(request)
            await self._send(peer, quiet)
        except TransportError:
            raise
        except BloomBeeError as error:
            logger.info("handed no session over to %s: %s", peer.remote, error)
            await peer.send(to_message(error, session=session, epoch=request.epoch))

    async def _send(self, peer: Connection, quiet: Quiet) -> None:
        carried, terms = quiet.carried, quiet.terms
        pieces = Pieces(terms, carried, await self._executor.call(_described))
        lengths = await self._executor.call(lambda pool: pool.lengths(terms.session))
        if lengths != carried.lengths:
            raise RequestError(f"the session holds {lengths} tokens here, its book says otherwise")
        for batch in batches(pieces.kv):
            for handed in await self._executor.call(
                lambda pool, batch=batch: pieces.export(pool, batch)
            ):
                await _send_page(peer, handed)
        for handed in pieces.row_pages():
            await _send_page(peer, handed)
        self._handed.add()
        self._handed_bytes.add(pieces.total_bytes)
        await peer.send(
            HandedOver(
                session=terms.session,
                lengths=carried.lengths,
                newest_steps=carried.newest_steps,
                released=carried.released,
                included=carried.included,
                outputs=tuple(step for step, _ in carried.outputs),
            )
        )


def _described(pool: KVPool) -> KVShape:
    return pool.shape


async def _send_page(peer: Connection, handed: Handed) -> None:
    try:
        async with asyncio.timeout(SEND_S):
            await peer.send(handed.page, handed.body)
    except TimeoutError:
        raise TransportError(f"{peer.remote} took no page for {SEND_S:g} s") from None
