"""Streams over libp2p: the way to peers behind NAT, through relays and punched holes.

Slower than the direct transport (MEASURED 2), so a fallback. The libp2p daemon
encrypts and knows both peers by their keys; our own hello follows all the same.
On the daemon's byte stream each frame is preceded by its length in four bytes,
little endian; a stream that ends without the end frame has broken.
"""

# hivemind ships no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from bloombee.errors import DeadlineExceeded, ProtocolError, TransportError
from bloombee.transport import serving
from bloombee.transport.interface import END, Endpoint, StreamHandler, TransportLimits
from bloombee.transport.pumped import PumpedStream
from bloombee.transport.tasks import TaskOwner
from bloombee.transport.window import WindowKeeper

if TYPE_CHECKING:
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

PROTOCOL = "bloombee/stream/1"

_HEAD_BYTES = 4
_FAILURES = (OSError, P2PDaemonError, P2PHandlerError, asyncio.IncompleteReadError)


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
        except _FAILURES as error:
            raise self._broken(error) from None
        return None if frame == END else frame

    async def write(self, frame: bytes) -> None:
        """Send one frame."""
        try:
            self._writer.write(len(frame).to_bytes(_HEAD_BYTES, "little"))
            self._writer.write(frame)
            await self._writer.drain()
        except _FAILURES as error:
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
    """Accepts streams that come through our libp2p daemon."""

    def __init__(self, p2p: P2P, limits: TransportLimits | None = None) -> None:
        self._p2p = p2p
        self._limits = limits or TransportLimits()
        self._windows = WindowKeeper(self._limits)
        self._handlers = TaskOwner()
        self._pumps = TaskOwner()
        self._handler: StreamHandler | None = None

    @property
    def address(self) -> str:
        """Our peer id: libp2p knows the way."""
        return str(self._p2p.peer_id)

    @property
    def endpoint(self) -> Endpoint:
        """What others dial."""
        return Endpoint(self.address, self.address)

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept; raises TransportError when the daemon refuses."""
        self._handler = handler
        try:
            await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)
        except _FAILURES as error:
            raise TransportError(f"the libp2p daemon refuses our handler: {error}") from None

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to `grace_s` for handlers, then cancel them."""
        self._handler = None
        try:
            await self._p2p.remove_binary_stream_handler(PROTOCOL)
        except _FAILURES as error:
            raise TransportError(f"the libp2p daemon keeps our handler: {error}") from None
        finally:
            await self._handlers.stop(grace_s)
            await self._pumps.stop(self._limits.linger_s)
            self._windows.close()

    async def _accept(
        self, stream_info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        remote = stream_info.peer_id.to_base58()
        wire = P2PWire(remote, reader, writer, self._limits.max_frame_bytes)
        if self._handler is None:
            wire.cancel()
            return
        stream = PumpedStream(wire, self._windows.window(remote), self._limits)
        serving.start(self._handlers, self._handler, stream)
        self._pumps.spawn(_pump(stream, wire))


class P2PDialer:
    """Opens streams through our libp2p daemon, to peers it can find."""

    def __init__(self, p2p: P2P, limits: TransportLimits | None = None) -> None:
        self._p2p = p2p
        self._limits = limits or TransportLimits()
        self._windows = WindowKeeper(self._limits)
        self._pumps = TaskOwner()
        self._streams: set[PumpedStream] = set()
        self._closed = False

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> PumpedStream:
        """A new stream to `endpoint.peer`, whatever its address.

        Raises TransportError (also for a malformed peer id) or DeadlineExceeded.
        """
        if self._closed:
            raise TransportError("the dialer is closed")
        try:
            async with asyncio.timeout(deadline_s):
                peer = PeerID.from_base58(endpoint.peer)
                _, reader, writer = await self._p2p.call_binary_stream_handler(peer, PROTOCOL)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{endpoint.peer} did not answer over libp2p within {deadline_s:g} s"
            ) from None
        except (*_FAILURES, ValueError) as error:
            raise TransportError(f"can't reach {endpoint.peer} over libp2p: {error}") from None
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
