"""A slow line, played by the process itself: rates and a delay around any transport's streams.

For machines where no network can be emulated. All streams of a process share its line.
What it sends leaves at the rate up and comes half a round trip later; what it receives
is held back to the rate down. TCP runs over the real link beneath, so that its windows,
losses and queues are not played; a frame counts whole, without headers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from bloombee.config.lines import LineShape
from bloombee.errors import BloomBeeError, TransportError
from bloombee.transport.tasks import TaskOwner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.transport.interface import (
        Buffer,
        Dialer,
        Endpoint,
        Listener,
        Stream,
        StreamCounters,
        StreamHandler,
    )

_QUEUED_BYTES = 4 << 20
"""How much one stream has under way before `send` waits, as a window would."""
_LINGER_S = 5.0


class ShapedLine:
    """The line of one process, which all its streams share."""

    def __init__(self, shape: LineShape) -> None:
        self._shape = shape
        self._up_free_s = 0.0
        self._down_free_s = -inf

    def leaves(self, now_s: float, size: int) -> float:
        """When a frame sent now has left and crossed; occupies the line up meanwhile."""
        self._up_free_s = max(now_s, self._up_free_s) + size / self._shape.up
        return self._up_free_s + self._shape.delay_s

    def arrives(self, now_s: float, size: int) -> float:
        """When a frame that is here now may be read; occupies the line down meanwhile.

        How long it took to come is not known, so that a frame after a pause is not held back:
        only what comes faster than the rate for longer is.
        """
        took_s = size / self._shape.down
        self._down_free_s = max(now_s - took_s, self._down_free_s) + took_s
        return self._down_free_s


class ShapedStream:
    """`Stream` whose frames take their time. `owner` holds the task that sends them."""

    def __init__(self, stream: Stream, line: ShapedLine, owner: TaskOwner) -> None:
        self.counters: StreamCounters = stream.counters
        self._stream = stream
        self._line = line
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._held: tuple[float, bytes] | None = None
        self._failure: BloomBeeError | None = None
        self._closing = False
        self._sending = owner.spawn(self._send_all())

    @property
    def remote(self) -> str:
        """The other end."""
        return self._stream.remote

    async def send(self, parts: Sequence[Buffer]) -> None:
        """As `Stream.send`; a frame that the stream beneath refuses breaks the stream."""
        while self._queued_bytes > _QUEUED_BYTES and not self._ended:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise TransportError(f"the stream with {self.remote} is closed")
        frame = b"".join(parts)
        self._queued_bytes += len(frame)
        due_s = self._line.leaves(asyncio.get_running_loop().time(), len(frame))
        self._queue.put_nowait((due_s, frame))

    async def receive(self) -> bytes | None:
        """As `Stream.receive`."""
        loop = asyncio.get_running_loop()
        if self._held is None:
            frame = await self._stream.receive()
            if frame is None:
                return None
            self._held = self._line.arrives(loop.time(), len(frame)), frame
        due_s, frame = self._held
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        self._held = None
        return frame

    async def close(self) -> None:
        """As `Stream.close`; what is under way still gets there."""
        self._closing = True
        self._room.set()
        self._queue.put_nowait((0.0, b""))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await asyncio.wait([self._sending])
        self.stop()
        await self._stream.close()

    def stop(self) -> None:
        """Send nothing more."""
        self._closing = True
        self._room.set()
        self._sending.cancel()

    @property
    def _ended(self) -> bool:
        return self._closing or self._sending.done()

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due_s, frame = await self._queue.get()
                if not frame and self._closing:
                    return
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await self._stream.send([frame])
                self._queued_bytes -= len(frame)
                self._room.set()
        except BloomBeeError as error:
            self._failure = error
        finally:
            self._room.set()


class ShapedDialer:
    """`Dialer` whose streams go over `line`; to connect takes what it takes beneath."""

    def __init__(self, dialer: Dialer, line: ShapedLine) -> None:
        self._dialer = dialer
        self._line = line
        self._owner = TaskOwner()

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        """As `Dialer.dial`."""
        return ShapedStream(await self._dialer.dial(endpoint, deadline_s), self._line, self._owner)

    async def close(self) -> None:
        """Close all connections; what is under way is lost."""
        await self._owner.stop(0.0)
        await self._dialer.close()


class ShapedListener:
    """`Listener` whose streams go over `line`."""

    def __init__(self, listener: Listener, line: ShapedLine) -> None:
        self._listener = listener
        self._line = line
        self._owner = TaskOwner()

    @property
    def address(self) -> str:
        """`host:port` actually bound."""
        return self._listener.address

    async def start(self, handler: StreamHandler) -> None:
        """As `Listener.start`."""

        async def serve(stream: Stream) -> None:
            shaped = ShapedStream(stream, self._line, self._owner)
            try:
                await handler(shaped)
                await shaped.close()
            finally:
                shaped.stop()

        await self._listener.start(serve)

    async def stop(self, grace_s: float) -> None:
        """As `Listener.stop`."""
        await self._listener.stop(grace_s)
        await self._owner.stop(0.0)


def line_of(emulate_link: str | None) -> ShapedLine | None:
    """The line that the setting asks for, if any."""
    return None if emulate_link is None else ShapedLine(LineShape.parse(emulate_link))


def dialer_over(line: ShapedLine | None, dialer: Dialer) -> Dialer:
    """`dialer` over a line; itself without one."""
    return dialer if line is None else ShapedDialer(dialer, line)


def listener_over(line: ShapedLine | None, listener: Listener) -> Listener:
    """`listener` over a line; itself without one."""
    return listener if line is None else ShapedListener(listener, line)
