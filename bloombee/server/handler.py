"""Accepts streams: handshake first, then whatever the other side came for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bloombee.core import PeerId
from bloombee.errors import BloomBeeError, DeadlineExceeded, PeerStopping, TransportError
from bloombee.protocol.failures import to_message
from bloombee.protocol.machine import State
from bloombee.protocol.messages import (
    AnyMessage,
    Attach,
    Beat,
    Close,
    Closed,
    Describe,
    Description,
    Fetch,
    Open,
)
from bloombee.server.client_stream import ClientStreams
from bloombee.server.executor import STOPPING
from bloombee.server.handover import HandOvers
from bloombee.server.hop_stream import HopStreams
from bloombee.server.throttle import Throttle
from bloombee.swarm.connection import Connection, ConnectionSettings, Signer, accept
from bloombee.swarm.measured import answer
from bloombee.transport.interface import Stream

logger = logging.getLogger(__name__)

REQUEST_DEADLINE_S = 60.0
"""How long a greeted peer may stay without asking for anything."""
_ASKING = (State.GREETED, State.REOPENING)
"""States in which a peer has nothing and may ask: the second, after its session was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerParts:
    """What the handler hands requests to."""

    identity: Signer
    certificate_hash: bytes
    connection_settings: ConnectionSettings
    clients: ClientStreams
    hops: HopStreams
    hand_overs: HandOvers
    throttle: Throttle
    describe: Callable[[Describe, PeerId], Awaitable[Description]]


class Handler:
    """Serves every stream that the listener accepts; one stream's faults stay its own."""

    def __init__(self, parts: HandlerParts) -> None:
        self._parts = parts
        self._stopping = False

    def stop(self) -> None:
        """Refuse whatever is asked from now on with PeerStopping."""
        self._stopping = True

    async def serve(self, stream: Stream) -> None:
        """One stream from handshake to end. Raises what breaks off the handshake."""
        parts = self._parts
        connection = await accept(
            stream, parts.identity, parts.certificate_hash, settings=parts.connection_settings
        )
        try:
            await self._converse(connection)
        except DeadlineExceeded:
            logger.debug("%s asked for nothing", connection.remote)
        except TransportError as error:
            logger.debug("stream of %s ended: %s", connection.remote, error)
        except BloomBeeError as error:
            logger.info("ended the stream of %s: %s", connection.remote, error)
            await _tell(connection, error)
        finally:
            await connection.close()

    async def _converse(self, connection: Connection) -> None:
        """Answer requests until the stream ends or has served its session."""
        while connection.state in _ASKING:
            received = await connection.receive(REQUEST_DEADLINE_S)
            if received is None:
                return
            if delay_s := self._parts.throttle.delay_s(
                connection.remote, asyncio.get_running_loop().time()
            ):
                await asyncio.sleep(delay_s)
            if self._stopping:
                raise PeerStopping(STOPPING)
            if not await self._answer(connection, received[0]):
                return

    async def _answer(self, connection: Connection, message: AnyMessage) -> bool:
        """Serve one request; False for what none is."""
        match message:
            case Describe():
                await connection.send(await self._parts.describe(message, connection.remote))
            case Open():
                await self._parts.clients.serve(connection, message)
            case Attach():
                await self._parts.hops.serve(connection, message)
            case Fetch():
                await self._parts.hand_overs.serve(connection, message)
            case Beat():
                await connection.send(answer(message))
            case Close(session):
                await connection.send(Closed(session))
            case _:
                return False
        return True


async def _tell(connection: Connection, error: BloomBeeError) -> None:
    """Say why the stream ends, if the other side can still hear."""
    if connection.state is State.OVER:
        return
    with contextlib.suppress(TransportError):
        await connection.send(to_message(error))
