"""Authenticated, typed messages over one stream of any transport.

`connect` dials, reads the server's challenge and answers it with a signed hello
without waiting for more, so the first message costs no further round trip.
`accept` is the other side. Both ends run the protocol's state machine over all
that is sent and received, so that nobody above meets a message out of order.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from bloombee.core import PeerId
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    DeadlineExceeded,
    ProtocolError,
    TransportError,
)
from bloombee.protocol import failures, framing, handshake
from bloombee.protocol.machine import Direction, Machine, Role, State
from bloombee.protocol.messages import AnyMessage, Challenge, Failed, Hello
from bloombee.protocol.text import one_line
from bloombee.swarm.identity import verify

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from bloombee.protocol.framing import Buffer
    from bloombee.transport.interface import Dialer, Endpoint, Stream, StreamCounters

NONCE_BYTES = 16

_Message = TypeVar("_Message", Challenge, Hello)


class Signer(Protocol):
    """Who we are: what `swarm.identity.Identity` has."""

    @property
    def peer_id(self) -> PeerId:
        """Our identity."""
        ...

    @property
    def public_key(self) -> bytes:
        """The key it is the hash of."""
        ...

    def sign(self, data: bytes) -> bytes:
        """Our signature over `data`."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """`swarm_key` is shared by all peers of a private swarm; `deadline_s` bounds the handshake."""

    swarm_key: bytes | None = None
    deadline_s: float = 10.0
    now: Callable[[], float] = time.time


class Connection:
    """Messages with one proven peer over one stream.

    Any task may send, one at a time receives. A `send` that was cancelled may
    have moved the state machine: close the connection then.
    """

    def __init__(self, stream: Stream, remote: PeerId, machine: Machine) -> None:
        self.remote = remote
        self._stream = stream
        self._machine = machine

    @property
    def counters(self) -> StreamCounters:
        """Bytes and frames so far."""
        return self._stream.counters

    @property
    def state(self) -> State:
        """Where the stream stands."""
        return self._machine.state

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        """Send one message with the bytes it describes; waits while the peer is slow.

        Raises ProtocolError when it may not come now, TransportError when the stream
        is broken or closed, RequestError when it is over the frame limit.
        """
        self._machine.advance(message, Direction.SENT)
        await self._stream.send(framing.encode(message, payload))

    async def receive(
        self, deadline_s: float | None = None
    ) -> tuple[AnyMessage, memoryview] | None:
        """The next message and its payload, or None when the peer has closed.

        A Failed about a session is returned. Raises the error that a Failed about
        the stream names (a refused handshake), ProtocolError for a malformed or
        misplaced message, TransportError when the stream broke, DeadlineExceeded
        after `deadline_s` without a message (nothing is lost then).
        """
        if deadline_s is not None:
            async with _deadline(deadline_s, self.remote):
                return await self.receive()
        while (frame := await self._stream.receive()) is not None:
            if (decoded := framing.decode(frame)) is not None:
                return self._taken(*decoded)
        return None

    def _taken(self, message: AnyMessage, payload: memoryview) -> tuple[AnyMessage, memoryview]:
        self._machine.advance(message, Direction.RECEIVED)
        if isinstance(message, Failed) and failures.is_about_stream(message):
            raise failures.to_error(message)
        return message, payload

    async def close(self) -> None:
        """End the stream; the peer reads what was sent, then None. Never raises."""
        await self._stream.close()


async def connect(
    dialer: Dialer, endpoint: Endpoint, identity: Signer, *, settings: ConnectionSettings
) -> Connection:
    """Open an authenticated connection to `endpoint`; takes one round trip on a warm link.

    Raises what `Dialer.dial` raises; DeadlineExceeded after `settings.deadline_s`;
    VersionMismatch; AuthError when another peer answers or the clocks are too far
    apart; or the error that the server answers with. A hello that the server
    refuses surfaces at the next `receive`.
    """
    async with _deadline(settings.deadline_s, endpoint.peer):
        stream = await dialer.dial(endpoint, settings.deadline_s)
        connection = Connection(stream, PeerId(endpoint.peer), Machine(Role.DIALER))
        async with _closed_on_error(stream):
            challenge = await _expect(connection, Challenge)
            if challenge.peer != endpoint.peer:
                other = one_line(challenge.peer, 80)
                raise AuthError(f"{endpoint.address} answers as {other}, not {endpoint.peer}")
            greeting = handshake.Greeting(challenge, endpoint.certificate_hash, settings.swarm_key)
            hello = handshake.answer(
                greeting, identity.peer_id, identity.public_key, identity.sign, settings.now()
            )
            await connection.send(hello)
    return connection


async def accept(
    stream: Stream, identity: Signer, certificate_hash: bytes, *, settings: ConnectionSettings
) -> Connection:
    """Challenge whoever opened `stream` and check the answer.

    `certificate_hash` is that of the certificate our listener shows. On failure it
    tells the other side why, closes the stream and raises AuthError,
    VersionMismatch, ProtocolError, TransportError or DeadlineExceeded.
    """
    connection = Connection(stream, PeerId(stream.remote), Machine(Role.LISTENER))
    challenge = Challenge(
        versions=handshake.VERSIONS,
        peer=identity.peer_id,
        nonce=secrets.token_bytes(NONCE_BYTES),
        time_s=settings.now(),
    )
    greeting = handshake.Greeting(challenge, certificate_hash, settings.swarm_key)
    async with _closed_on_error(stream), _told(connection):
        async with _deadline(settings.deadline_s, stream.remote):
            await connection.send(challenge)
            hello = await _expect(connection, Hello)
        connection.remote = handshake.check(greeting, hello, verify, settings.now())
    return connection


async def _expect(connection: Connection, kind: type[_Message]) -> _Message:
    received = await connection.receive()
    if received is None:
        raise TransportError(f"{connection.remote} closed the stream during the handshake")
    message = received[0]
    if isinstance(message, Failed):
        raise failures.to_error(message)
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} instead of {kind.__name__}")
    return message


@asynccontextmanager
async def _deadline(deadline_s: float, peer: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{peer} did not answer within {deadline_s:g} s") from None


@asynccontextmanager
async def _closed_on_error(stream: Stream) -> AsyncGenerator[None, None]:
    try:
        yield
    except BaseException:
        await stream.close()
        raise


@asynccontextmanager
async def _told(connection: Connection) -> AsyncGenerator[None, None]:
    """Tell the other side of an error of ours, if it can still hear."""
    try:
        yield
    except BloomBeeError as error:
        if connection.state is not State.OVER and not isinstance(error, TransportError):
            try:
                await connection.send(failures.to_message(error))
            except TransportError as untold:
                raise error from untold
        raise
