"""Direct streams: gRPC over TLS with pinned certificates, raw bytes, no protobuf.

One bidirectional call is one stream; all streams to one endpoint share a
connection. Several event loops in threads of one process may use it, each with
its own listeners and dialers, which must be stopped or closed before their loop:
gRPC has one queue of completions for all loops, and one for a closed loop blocks it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from bloombee.errors import DeadlineExceeded, SettingsError, TransportError
from bloombee.transport import certificates, congestion, serving
from bloombee.transport.grpc_options import channel_options, server_options
from bloombee.transport.grpc_wire import METHOD, SERVICE, ClientWire, ServerWire, failure
from bloombee.transport.interface import Endpoint, StreamHandler, TransportLimits
from bloombee.transport.pumped import PumpedStream
from bloombee.transport.tasks import TaskOwner
from bloombee.transport.window import WindowKeeper

if TYPE_CHECKING:
    from bloombee.transport.certificates import Certificate
    from bloombee.transport.grpc_wire import Call, Context

_SETTLING_S = 1.0
"""How long the pumps of ended streams get to see it."""

_DRAINING_S = 0.05
"""How long completions of cancelled operations may trickle in before the loop may close."""


class DirectListener:
    """Accepts streams on `host:port` (port 0: a free one) and shows `certificate`."""

    def __init__(
        self,
        host: str,
        port: int,
        certificate: Certificate,
        limits: TransportLimits | None = None,
    ) -> None:
        self.certificate = certificate
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._limits = limits or TransportLimits()
        self._windows = WindowKeeper(self._limits)
        self._handlers = TaskOwner()
        self._pumps = TaskOwner()
        self._server: grpc.aio.Server | None = None
        self._handler: StreamHandler | None = None

    @property
    def address(self) -> str:
        """`host:port`, with the port actually bound once started."""
        return f"{self._host}:{self._port}"

    @property
    def endpoint(self) -> Endpoint:
        """What a peer on the same host would dial."""
        return Endpoint(self.certificate.peer, self.address, self.certificate.hash)

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept; raises SettingsError when the address can't be listened on."""
        self._handler = handler
        self._check_free()
        server = grpc.aio.server(options=server_options(self._limits))
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            METHOD: grpc.stream_stream_rpc_method_handler(self._accept)
        }
        service = grpc.method_handlers_generic_handler(SERVICE, methods)
        server.add_generic_rpc_handlers((service,))
        pair = (self.certificate.key_pem, self.certificate.certificate_pem)
        try:
            self._port = server.add_secure_port(self.address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise self._taken(str(error)) from None
        await server.start()
        congestion.prefer_cubic_listening(self._port)
        self._server = server

    def _check_free(self) -> None:
        """Try the address first: gRPC would log its own lines and not say what is wrong."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            with socket.create_server((self._host.strip("[]"), self._port), family=family):
                return
        except OSError as error:
            raise self._taken(error.strerror or str(error)) from None

    def _taken(self, reason: str) -> SettingsError:
        return SettingsError(
            f"can't listen on {self.address} ({reason}): choose another --host or --port"
        )

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to `grace_s` for handlers, then cancel them."""
        if self._server is None:
            return
        server, self._server, self._handler = self._server, None, None
        # The streams end first and with a status: gRPC would reset the connections.
        await self._handlers.stop(grace_s)
        await server.stop(_SETTLING_S)
        await self._pumps.stop(_SETTLING_S)
        self._windows.close()
        await asyncio.sleep(_DRAINING_S)

    async def _accept(self, _requests: object, context: Context) -> None:
        if self._handler is not None:
            # At once, so that the dialer knows that it has reached us.
            await context.send_initial_metadata(())
        if self._handler is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        wire = ServerWire(context)
        stream = PumpedStream(wire, self._windows.window(wire.remote), self._limits)
        self._pumps.spawn(stream.pump_in())
        serving.start(self._handlers, self._handler, stream)
        try:
            await stream.pump_out()
        except asyncio.CancelledError:
            if not wire.cancelled:  # by gRPC: the connection broke
                raise
        if stream.aborted is not None:
            await context.abort(grpc.StatusCode.ABORTED, str(stream.aborted))


@dataclass(eq=False)
class _Connection:
    """A channel to one endpoint, its streams and dials, and whether new ones may join."""

    channel: grpc.aio.Channel
    open: grpc.aio.StreamStreamMultiCallable[Any, Any]
    streams: set[PumpedStream] = field(default_factory=set[PumpedStream])
    dials: int = 0
    retired: bool = False

    @property
    def used(self) -> bool:
        """Whether a stream or a dial needs it."""
        return bool(self.streams or self.dials)


@dataclass
class _Slot:
    """One dialer's way to one endpoint; the lock makes concurrent dials share it.

    It is dropped when it is `idle` for long, and at once when no connection stands.
    """

    endpoint: Endpoint
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: _Connection | None = None
    certificate_pem: bytes = b""
    dials: int = 0
    idle: asyncio.TimerHandle | None = None

    @property
    def used(self) -> bool:
        """Whether a stream or a dial needs it."""
        return bool(self.dials) or (self.connection is not None and self.connection.used)


class DirectDialer:
    """Opens streams from one event loop; keeps a connection to each endpoint dialed."""

    def __init__(self, limits: TransportLimits | None = None) -> None:
        self._limits = limits or TransportLimits()
        self._windows = WindowKeeper(self._limits)
        self._pumps = TaskOwner()
        self._slots: dict[Endpoint, _Slot] = {}
        self._connections: set[_Connection] = set()
        self._closed = False

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> PumpedStream:
        """A new stream; raises as `Dialer.dial` says.

        The first dial to an endpoint fetches its certificate and connects; later ones
        take one round trip.
        """
        if self._closed:
            raise TransportError("the dialer is closed")
        slot = self._slots.setdefault(endpoint, _Slot(endpoint))
        slot.dials += 1
        try:
            async with asyncio.timeout(deadline_s):
                return await self._dial(slot, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{endpoint.address} did not answer within {deadline_s:g} s"
            ) from None
        finally:
            slot.dials -= 1
            self._settle(slot)

    async def _dial(self, slot: _Slot, deadline_s: float) -> PumpedStream:
        connection = await self._connection(slot, deadline_s)
        connection.dials += 1
        try:
            call = await self._call(slot, connection)
            wire = ClientWire(call, slot.endpoint.address)
            stream = PumpedStream(wire, self._windows.window(connection), self._limits)
            connection.streams.add(stream)
        finally:
            connection.dials -= 1
            await self._close_unused(connection)
        self._pumps.spawn(self._pump_in(stream, slot, connection))
        self._pumps.spawn(stream.pump_out())
        return stream

    async def close(self) -> None:
        """Break all streams and close all connections."""
        self._closed = True
        for stream in [each for opened in self._connections for each in opened.streams]:
            if not stream.closed:
                stream.abort(TransportError("the dialer was closed"))
        await self._pumps.stop(_SETTLING_S)
        for connection in tuple(self._connections):
            await connection.channel.close()
        self._connections.clear()
        for slot in self._slots.values():
            if slot.idle is not None:
                slot.idle.cancel()
        self._slots.clear()
        self._windows.close()
        await asyncio.sleep(_DRAINING_S)

    async def _connection(self, slot: _Slot, deadline_s: float) -> _Connection:
        async with slot.lock:
            if not slot.certificate_pem:
                slot.certificate_pem = await certificates.fetch(slot.endpoint, deadline_s)
            if slot.connection is None:
                slot.connection = self._open(slot.endpoint, slot.certificate_pem)
                self._connections.add(slot.connection)
            return slot.connection

    def _open(self, endpoint: Endpoint, certificate_pem: bytes) -> _Connection:
        channel = grpc.aio.secure_channel(
            endpoint.address,
            grpc.ssl_channel_credentials(certificate_pem),
            options=channel_options(self._limits, endpoint.peer),
        )
        return _Connection(channel, channel.stream_stream(f"/{SERVICE}/{METHOD}"))

    async def _call(self, slot: _Slot, connection: _Connection) -> Call:
        """A call that the server has answered; cancelled when we don't return it."""
        address = slot.endpoint.address
        call = connection.open()
        try:
            await call.initial_metadata()
            if call.done() and (error := await failure(call, address)) is not None:
                self._retire(slot, connection)
                raise error
        except BaseException:
            call.cancel()
            raise
        if not connection.streams:  # the first one, or the first after the connection broke
            congestion.prefer_cubic_connected(*certificates.split_address(address))
        return call

    @staticmethod
    def _retire(slot: _Slot, connection: _Connection) -> None:
        """Let the next dial connect anew instead of waiting out gRPC's backoff."""
        connection.retired = True
        if slot.connection is connection:
            slot.connection = None

    def _settle(self, slot: _Slot) -> None:
        """Drop what no dial and no stream needs any more: now, or when it has been idle."""
        if slot.idle is not None:
            slot.idle.cancel()
            slot.idle = None
        if slot.used or self._closed:
            return
        if slot.connection is None:
            self._drop(slot)
        else:
            loop = asyncio.get_running_loop()
            slot.idle = loop.call_later(self._limits.idle_s, self._drop, slot)

    def _drop(self, slot: _Slot) -> None:
        if slot.used:
            return
        self._slots.pop(slot.endpoint, None)
        if slot.connection is not None:
            slot.connection.retired = True
            self._pumps.spawn(self._close_unused(slot.connection))

    async def _pump_in(self, stream: PumpedStream, slot: _Slot, connection: _Connection) -> None:
        try:
            await stream.pump_in()
        finally:
            connection.streams.discard(stream)
            self._settle(slot)
            await self._close_unused(connection)

    async def _close_unused(self, connection: _Connection) -> None:
        if connection.retired and not connection.used and connection in self._connections:
            self._connections.discard(connection)
            await connection.channel.close()
