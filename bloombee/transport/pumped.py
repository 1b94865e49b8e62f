"""A stream whose frames are moved by two pumps over something that must not be cancelled.

Cancelling a read or write of a gRPC call cancels the call. So the callers of a
stream only touch queues, and the pumps alone touch the call: deadlines around
`receive` are safe, and a slow reader fills the queue, then HTTP/2's window, then
the sender's queue. The pumps end when the call ends, never by being cancelled
in an operation: gRPC would deliver its completion to an event loop that may be
closed by then, and all other loops of the process would hang.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from bloombee.errors import BloomBeeError, TransportError
from bloombee.transport.frame_queue import FrameQueue
from bloombee.transport.frames import join
from bloombee.transport.interface import KEEP_ALIVE, Buffer, StreamCounters, TransportLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.transport.window import Window


class Wire(Protocol):
    """One end of a connection that carries a single stream of frames."""

    @property
    def remote(self) -> str:
        """The other end, for messages."""
        ...

    async def read(self) -> bytes | None:
        """The next frame or None at a clean end; raises TransportError or ProtocolError."""
        ...

    async def write(self, frame: bytes) -> None:
        """Send one frame; raises TransportError."""
        ...

    async def finish(self) -> None:
        """Tell the other side that nothing follows; raises TransportError."""
        ...

    def cancel(self) -> None:
        """Break it; a pending read and write raise. Never raises."""
        ...


class PumpedStream:
    """`Stream` over a `Wire`; its owner runs `pump_in` and `pump_out`, each in a task."""

    def __init__(self, wire: Wire, window: Window, limits: TransportLimits) -> None:
        self.counters = StreamCounters()
        self.aborted: BloomBeeError | None = None
        self._wire = wire
        self._window = window
        self._limits = limits
        self._outgoing = FrameQueue(limits.queue_bytes)
        self._incoming = FrameQueue(limits.queue_bytes)
        self._closed = False
        self._flushed = asyncio.Event()
        self._hangs_up: asyncio.TimerHandle | None = None
        window.join(self)

    @property
    def remote(self) -> str:
        """The other end, for messages and logs."""
        return self._wire.remote

    @property
    def closed(self) -> bool:
        """Whether we have closed or broken it."""
        return self._closed

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Queue one frame; raises as `Stream.send` says."""
        frame = join(parts, self._limits.max_frame_bytes)
        await self._outgoing.room()
        if self._closed:
            raise TransportError(f"the stream to {self.remote} is closed")
        self.counters.frames_sent += 1
        self.counters.bytes_sent += len(frame)
        self._outgoing.put(frame)
        self._window.sent(len(frame))

    async def receive(self) -> bytes | None:
        """The next frame or None; raises as `Stream.receive` says."""
        frame = await self._incoming.get()
        if frame is not None:
            self.counters.frames_received += 1
            self.counters.bytes_received += len(frame)
        return frame

    async def close(self) -> None:
        """End the stream in order; breaks it when the reader takes longer than `linger_s`."""
        if self._closed:
            return
        self._closed = True
        self._incoming.close()
        self._outgoing.end()
        try:
            async with asyncio.timeout(self._limits.linger_s):
                await self._flushed.wait()
        except TimeoutError:
            self.abort(TransportError(f"{self.remote} did not read what was sent"))
        else:
            # The other side may leave its end open: it has had what we sent.
            loop = asyncio.get_running_loop()
            self._hangs_up = loop.call_later(self._limits.linger_s, self._wire.cancel)

    def abort(self, error: BloomBeeError) -> None:
        """Break it for both ends at once; what was not read is lost."""
        self.aborted = self.aborted or error
        self._closed = True
        self._break(error)
        self._wire.cancel()

    def keep_alive(self) -> bool:
        """Send the keep-alive frame unless frames wait already; False when it is closed."""
        if self._outgoing.idle:
            self._outgoing.put(KEEP_ALIVE)
        return not self._outgoing.ended

    async def pump_in(self) -> None:
        """Move frames to `receive` until the other side or the connection has ended."""
        try:
            while True:
                await self._incoming.room()
                frame = await self._wire.read()
                if frame is None:
                    break
                if frame != KEEP_ALIVE:
                    self._incoming.put(frame)
            self._incoming.end()
            self._outgoing.fail(TransportError(f"{self.remote} has closed the stream"))
        except BloomBeeError as error:
            self._lose(error)
        finally:
            self._lose(TransportError(f"the connection to {self.remote} broke"))
            self._window.leave(self)
            if self._hangs_up is not None:
                self._hangs_up.cancel()

    async def pump_out(self) -> None:
        """Move frames from `send` until we, the other side or the connection has ended."""
        try:
            while (frame := await self._outgoing.get()) is not None:
                await self._wire.write(frame)
            await self._wire.finish()
        except BloomBeeError as error:
            # Whether what was received stands is for the reader to find out.
            self._outgoing.fail(error)
        finally:
            self._outgoing.fail(TransportError(f"the connection to {self.remote} broke"))
            self._flushed.set()

    def _break(self, error: BloomBeeError) -> None:
        """Fail what has not ended; the first error counts."""
        self._incoming.fail(error)
        self._outgoing.fail(error)

    def _lose(self, error: BloomBeeError) -> None:
        """Fail what has not ended, after the frames that arrived before."""
        self._incoming.fail(error, keep_queued=True)
        self._outgoing.fail(error)
