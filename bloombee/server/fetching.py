"""Taking a session over from the server that held it: dial, fetch, check, load.

Whatever goes wrong (an error, a page that doesn't fit, a link on which it takes
longer than replay would) ends in empty sequences, which the client then has replayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from bloombee.errors import BloomBeeError, ProtocolError, TransportError
from bloombee.kv.interface import KVPool
from bloombee.planner.handover import Progress, worth_fetching
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import Failed, Fetch, HandedOver, Output, Pages, Source
from bloombee.server.admission import Admission
from bloombee.server.carried import Carried, Terms
from bloombee.server.executor import Executor
from bloombee.server.intake import Intake, load
from bloombee.server.pieces import PIECE_BYTES
from bloombee.swarm.connection import Connection, ConnectionSettings, Signer, connect
from bloombee.telemetry import Registry
from bloombee.transport.interface import Dialer, Endpoint

logger = logging.getLogger(__name__)

MOST_S = 120.0
"""A fetch is over by then, whatever the client allows."""
SILENCE_S = 5.0
"""Without a page for so long the other side is as good as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchParts:
    """What fetching takes."""

    admission: Admission
    executor: Executor
    identity: Signer
    dialer: Dialer
    connection_settings: ConnectionSettings
    telemetry: Registry


class Fetcher:
    """Fetches sessions from servers that are about to end."""

    def __init__(self, parts: FetchParts) -> None:
        self._parts = parts
        self._fetched = parts.telemetry.counter("fetched_sessions")
        self._fetched_bytes = parts.telemetry.counter("fetched_bytes")
        self._given_up = parts.telemetry.counter("fetches_given_up")

    async def fetch(self, terms: Terms, source: Source) -> Carried | None:
        """What `source` held of a session whose KV is reserved here and empty.

        Its KV is in the pool afterwards. None, and empty sequences, when it could not
        be had, or not within `source.limit_s`. Raises RequestError when the session was
        freed meanwhile, PeerStopping when this server ends.
        """
        try:
            async with asyncio.timeout(min(source.limit_s, MOST_S)):
                carried = await self._attempt(terms, source)
        except TimeoutError:
            why = f"not there within {source.limit_s:.3g} s"
        except BloomBeeError as error:
            why = str(error)
        else:
            self._fetched.add()
            logger.info("took over a session of %d tokens", sum(carried.lengths))
            return carried
        logger.info("could not take over a session from %s: %s", source.hop.address, why)
        self._given_up.add()
        await self._parts.executor.call(lambda pool: _empty(pool, terms))
        return None

    async def _attempt(self, terms: Terms, source: Source) -> Carried:
        parts, hop, span = self._parts, source.hop, terms.span
        meter = _Meter(source.limit_s)
        endpoint = Endpoint(hop.peer, hop.address, hop.certificate_hash)
        link = await connect(
            parts.dialer, endpoint, parts.identity, settings=parts.connection_settings
        )
        try:
            await link.send(Fetch(terms.session, source.secret, source.epoch, span.start, span.end))
            intake = Intake(terms, await parts.executor.call(lambda pool: pool.shape))
            told = await self._receive(link, intake, meter)
        finally:
            await link.close()
        carried = intake.finish(told)
        await self._load(terms, intake)
        gone = [sequence for sequence, released in enumerate(carried.released) if released]
        await parts.executor.call(lambda pool: _settle(pool, terms, carried.lengths, gone))
        parts.admission.released(terms.session, gone)
        self._fetched_bytes.add(intake.received_bytes)
        return carried

    async def _receive(self, link: Connection, intake: Intake, meter: _Meter) -> HandedOver:
        """Take pages until all are there; KV is loaded as it comes."""
        while (received := await link.receive(SILENCE_S)) is not None:
            message, body = received
            if isinstance(message, HandedOver):
                return message
            if isinstance(message, Failed):
                raise to_error(message)
            if isinstance(message, Output):
                intake.take_tokens(message, body)
                continue
            if not isinstance(message, Pages):
                raise ProtocolError(f"{type(message).__name__} instead of pages")
            intake.take(message, body)
            if not worth_fetching(meter.read(intake, body.nbytes), meter.limit_s):
                raise TransportError(
                    f"{intake.total_bytes} bytes would not be there within {meter.limit_s:.3g} s"
                )
            if intake.waiting_bytes >= PIECE_BYTES:
                await self._load(intake.terms, intake)
        raise TransportError("the stream ended before the session was handed over")

    async def _load(self, terms: Terms, intake: Intake) -> None:
        loads, intake.loads = intake.loads, []
        if loads:
            await self._parts.executor.call(lambda pool: load(pool, terms, loads))


class _Meter:
    """Times a fetch from its start, and the pages behind the first one."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self._first_s: float | None = None
        self._first_bytes = 0

    def read(self, intake: Intake, page_bytes: int) -> Progress:
        """How far it is, now that a page of `page_bytes` has come."""
        now_s = self._clock()
        if self._first_s is None:
            self._first_s, self._first_bytes = now_s, page_bytes
        return Progress(
            total_bytes=intake.total_bytes,
            received_bytes=intake.received_bytes,
            elapsed_s=now_s - self._started_s,
            sample_bytes=intake.received_bytes - self._first_bytes,
            sample_s=now_s - self._first_s,
        )


def _empty(pool: KVPool, terms: Terms) -> None:
    for sequence in range(terms.sequences):
        pool.truncate(terms.session, sequence, 0)


def _settle(pool: KVPool, terms: Terms, lengths: Sequence[int], gone: Sequence[int]) -> None:
    """Release what is `gone`, once the pool holds exactly what was announced."""
    if pool.lengths(terms.session) != tuple(lengths):
        raise ProtocolError(f"{pool.lengths(terms.session)} tokens were loaded")
    for sequence in gone:
        pool.release(terms.session, sequence)
