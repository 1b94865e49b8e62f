"""Streams over libp2p: the way to peers behind NAT, through relays and punched holes.

Slower than the direct transport (MEASURED 2), so a fallback. The libp2p daemon
encrypts from end to end and knows both peers by their keys. Our own hello follows all
the same, signed over the certificate hash of the server's record, as on a direct
stream: it names the server it is for, and libp2p has proven that it went there, so no
other peer, relays included, ever holds one that a server would take.
On the daemon's byte stream each frame is preceded by its length in four bytes,
little endian; a stream that ends without the end frame has broken.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING

from bloombee.errors import DeadlineExceeded, ProtocolError, TransportError
from bloombee.transport import serving
from bloombee.transport.interface import END, Endpoint, StreamHandler, TransportLimits
from bloombee.transport.p2p_control import FAILURES, DaemonControl, Ends, read_opener
from bloombee.transport.pumped import PumpedStream
from bloombee.transport.tasks import TaskOwner
from bloombee.transport.window import WindowKeeper

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOL = "bloombee/stream/1"

_HEAD_BYTES = 4
_DAEMON_S = 2.0
"""For the daemon on this machine to answer what needs no network."""
_AGAIN_S = 0.25
"""Between looks whether a daemon that ended is back."""
_REASON_CHARACTERS = 300
"""Of what the daemon says, which is a line for each address that it tried."""
_log = logging.getLogger(__name__)


class P2PWire:
    """One end of a libp2p stream, as the local daemon hands it to us over a socket."""

    def __init__(
        self,
        remote: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_frame_bytes: int,
    ) -> None:
        self._remote = remote
        self._reader = reader
        self._writer = writer
        self._max_frame_bytes = max_frame_bytes

    @property
    def remote(self) -> str:
        """The other peer."""
        return self._remote

    async def read(self) -> bytes | None:
        """The next frame; its length is checked before anything is allocated."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_HEAD_BYTES), "little")
            if size > self._max_frame_bytes:
                self.cancel()
                raise ProtocolError(
                    f"a frame of {size} bytes from {self._remote} is over our limit "
                    f"of {self._max_frame_bytes}"
                )
            frame = await self._reader.readexactly(size)
        except FAILURES as error:
            raise self._broken(error) from None
        return None if frame == END else frame

    async def write(self, frame: bytes) -> None:
        """Send one frame."""
        try:
            self._writer.write(len(frame).to_bytes(_HEAD_BYTES, "little"))
            self._writer.write(frame)
            await self._writer.drain()
        except FAILURES as error:
            raise self._broken(error) from None

    async def finish(self) -> None:
        """Send the end frame."""
        await self.write(END)

    def cancel(self) -> None:
        """Cut the socket to the daemon, which resets the stream."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Close the socket when both directions are done; what was written still goes."""
        self._writer.close()

    def _broken(self, error: Exception) -> TransportError:
        return TransportError(f"the connection to {self._remote} broke: {error}")


class P2PListener:
    """Accepts streams that come through the libp2p daemon at `control`, which is `peer`.

    The daemon hands each stream over on a Unix socket beside its control socket, to
    the event loop that started the listener; idle it costs nothing. A daemon that takes
    the place of another at `control` is asked to do the same.
    """

    def __init__(self, control: Path, peer: str, limits: TransportLimits | None = None) -> None:
        self._daemon = DaemonControl(control)
        self._socket = control.with_name(f"streams-{secrets.token_hex(4)}.sock")
        self._peer = peer
        self._limits = limits or TransportLimits()
        self._windows = WindowKeeper(self._limits)
        self._handlers = TaskOwner()
        self._pumps = TaskOwner()
        self._watch = TaskOwner()
        self._handler: StreamHandler | None = None
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """None: libp2p finds the way by the peer's id."""
        return ""

    @property
    def endpoint(self) -> Endpoint:
        """What others dial."""
        return Endpoint(self._peer, self.address)

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept; raises TransportError when the daemon refuses or is gone."""
        self._handler = handler
        try:
            async with asyncio.timeout(_DAEMON_S):
                self._server = await asyncio.start_unix_server(self._accept, self._socket)
            ends = await self._register()
        except FAILURES as error:
            raise TransportError(
                f"the libp2p daemon takes no handler for streams: {error or 'no answer'}; "
                "restart this process"
            ) from None
        self._watch.spawn(self._stay_registered(*ends))

    async def _register(self) -> Ends:
        async with asyncio.timeout(_DAEMON_S):
            return await self._daemon.accept_streams(PROTOCOL, self._socket)

    async def _stay_registered(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Register with each daemon that follows; the connection to one ends with it."""
        while True:
            try:
                await reader.read()
            except FAILURES as error:
                _log.debug("the libp2p daemon reset its connection: %r", error)
            finally:
                writer.close()
            reader, writer = await self._registered_again()
            _log.debug("streams come through the libp2p daemon again")

    async def _registered_again(self) -> Ends:
        # Whether there will be another is for the daemon's owner to find out, and to tell.
        while True:
            await asyncio.sleep(_AGAIN_S)
            try:
                return await self._register()
            except FAILURES as error:
                _log.debug("no libp2p daemon yet: %r", error)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to `grace_s` for handlers, then cancel them."""
        self._handler = None
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._watch.stop(0.0)
        try:
            async with asyncio.timeout(_DAEMON_S):
                await self._daemon.refuse_streams(PROTOCOL, self._socket)
        except FAILURES as error:  # it has ended, and accepts no more either
            _log.debug("the libp2p daemon was not told that we stop: %r", error)
        server.close()
        await self._handlers.stop(grace_s)
        await self._pumps.stop(self._limits.linger_s)
        self._windows.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_DAEMON_S):
                remote = await read_opener(reader)
        except FAILURES as error:
            _log.debug("the libp2p daemon handed over no stream: %r", error)
            writer.transport.abort()
            return
        wire = P2PWire(remote, reader, writer, self._limits.max_frame_bytes)
        if self._handler is None:
            wire.cancel()
            return
        stream = PumpedStream(wire, self._windows.window(remote), self._limits)
        serving.start(self._handlers, self._handler, stream)
        self._pumps.spawn(_pump(stream, wire))


class P2PDialer:
    """Opens streams through the libp2p daemon at `control`, to peers it can find."""

    def __init__(self, control: Path, limits: TransportLimits | None = None) -> None:
        self._daemon = DaemonControl(control)
        self._limits = limits or TransportLimits()
        self._windows = WindowKeeper(self._limits)
        self._pumps = TaskOwner()
        self._streams: set[PumpedStream] = set()
        self._closed = False

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> PumpedStream:
        """A new stream to `endpoint.peer`, whatever its address.

        libp2p may open one on what it remembers of the peer; where that has stopped
        accepting since, the first `receive` raises TransportError.
        Raises TransportError (also for a malformed peer id) or DeadlineExceeded.
        """
        if self._closed:
            raise TransportError("the dialer is closed")
        try:
            async with asyncio.timeout(deadline_s):
                reader, writer = await self._daemon.open_stream(endpoint.peer, PROTOCOL)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{endpoint.peer} did not answer over libp2p within {deadline_s:g} s"
            ) from None
        except (*FAILURES, ValueError) as error:
            why = " ".join(str(error).split())[:_REASON_CHARACTERS]
            raise TransportError(f"can't reach {endpoint.peer} over libp2p: {why}") from None
        wire = P2PWire(endpoint.peer, reader, writer, self._limits.max_frame_bytes)
        stream = PumpedStream(wire, self._windows.window(endpoint.peer), self._limits)
        self._streams.add(stream)
        self._pumps.spawn(self._run(stream, wire))
        return stream

    async def close(self) -> None:
        """Break all streams."""
        self._closed = True
        for stream in self._streams:
            if not stream.closed:
                stream.abort(TransportError("the dialer was closed"))
        await self._pumps.stop(1.0)
        self._windows.close()

    async def _run(self, stream: PumpedStream, wire: P2PWire) -> None:
        try:
            await _pump(stream, wire)
        finally:
            self._streams.discard(stream)


async def _pump(stream: PumpedStream, wire: P2PWire) -> None:
    try:
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(stream.pump_in())
            pumps.create_task(stream.pump_out())
    finally:
        wire.close()
