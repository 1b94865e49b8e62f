"""One stream of a `MemoryNetwork`: two ways, each crossing a link."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from bloombee.errors import BloomBeeError, ProtocolError, TransportError
from bloombee.transport.frame_queue import FrameQueue
from bloombee.transport.frames import join
from bloombee.transport.interface import Buffer, StreamCounters, TransportLimits
from bloombee.transport.links import Clock, Fate, Link

if TYPE_CHECKING:
    from collections.abc import Sequence

_End = tuple[str, Link, TransportLimits]

SWAP_WAIT_S = 0.2
"""How long a frame waits for the one that is to overtake it."""


class _Way:
    """Frames from one end to the other: in flight over the link, then in the reader's queue."""

    def __init__(self, link: Link, clock: Clock, limits: TransportLimits) -> None:
        self.link = link
        self.queue = FrameQueue(limits.queue_bytes)
        self.empty = asyncio.Event()
        self.empty.set()
        self._clock = clock
        self._in_flight: deque[bytes | None] = deque()
        self._overtaken: deque[bytes] = deque()
        self._due = 0
        self._last_arrival = 0.0

    def push(self, frame: bytes | None) -> None:
        """Send a frame, or the end of the stream, on its way."""
        if frame is None:
            self._release_overtaken()
        self._launch(frame)
        self._release_overtaken()

    def push_after_next(self, frame: bytes) -> None:
        """Send a frame once the next has gone, or after a short while."""
        self._overtaken.append(frame)
        self.empty.clear()
        self._clock.call_later(SWAP_WAIT_S, self._release_overtaken)

    def _release_overtaken(self) -> None:
        while self._overtaken:
            self._launch(self._overtaken.popleft())

    def _launch(self, frame: bytes | None) -> None:
        size = 0 if frame is None else len(frame)
        now = self._clock.time()
        self._last_arrival = max(self._last_arrival, self.link.arrival(now, size))
        self.queue.reserve(size)
        self._in_flight.append(frame)
        self.empty.clear()
        if self._last_arrival <= now and len(self._in_flight) == self._due + 1:
            self._arrived()
        else:
            self._clock.call_later(self._last_arrival - now, self._arrived)

    def _arrived(self) -> None:
        self._due += 1
        self.flush()

    def flush(self) -> None:
        """Hand over the frames whose time has come, unless the link is cut."""
        while self._due and self._in_flight and not self.link.cut:
            self._due -= 1
            frame = self._in_flight.popleft()
            if frame is None:
                self.queue.end()
            else:
                self.queue.deliver(frame)
        if not self._in_flight and not self._overtaken:
            self.empty.set()

    def fail(self, error: BloomBeeError) -> None:
        """Drop everything in flight and break the reader's queue."""
        self._in_flight.clear()
        self._overtaken.clear()
        self._due = 0
        self.queue.fail(error)
        self.empty.set()


Owner = dict["MemoryStream", None]
"""Streams in the order in which they were made."""


class MemoryStream:
    """`Stream` between two peers; `abort` breaks it for both."""

    def __init__(
        self, local: str, remote: str, ways: tuple[_Way, _Way], limits: TransportLimits
    ) -> None:
        self.local = local
        self.counters = StreamCounters()
        self.peer_limits = limits
        self._remote = remote
        self._limits = limits
        self._outgoing, self._incoming = ways
        self._closed = False
        self._dead = False
        self.owners: tuple[Owner, ...] = ()

    @property
    def remote(self) -> str:
        """The peer at the other end."""
        return self._remote

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send one frame; raises as `Stream.send` says."""
        frame = join(parts, self._limits.max_frame_bytes)
        self._check_open()
        await self._outgoing.queue.room()
        self._check_open()
        if len(frame) > self.peer_limits.max_frame_bytes:
            self._break_oversized(len(frame))
        self.counters.frames_sent += 1
        self.counters.bytes_sent += len(frame)
        match self._outgoing.link.fate(frame):
            case Fate.DELIVER:
                self._outgoing.push(frame)
            case Fate.DROP:
                pass
            case Fate.REPEAT:
                self._outgoing.push(frame)
                self._outgoing.push(frame)
            case Fate.SWAP:
                self._outgoing.push_after_next(frame)
            case Fate.RESET:
                self.reset()
            case Fate.CLOSE:
                self.end()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the stream to {self.remote} is closed")
        if self._incoming.queue.ended:
            raise TransportError(f"{self.remote} has closed the stream")

    def _break_oversized(self, size: int) -> None:
        limit = self.peer_limits.max_frame_bytes
        error = ProtocolError(f"a frame of {size} bytes is over {self.remote}'s limit of {limit}")
        self.abort(error)
        raise error

    async def receive(self) -> bytes | None:
        """The next frame or None; raises as `Stream.receive` says."""
        frame = await self._incoming.queue.get()
        if frame is not None:
            self.counters.frames_received += 1
            self.counters.bytes_received += len(frame)
        return frame

    async def close(self) -> None:
        """End the stream in order; breaks it when the reader takes longer than `linger_s`."""
        if self._closed:
            return
        self._closed = True
        self._incoming.queue.close()
        if not self._outgoing.queue.ended:
            self._outgoing.push(None)
        self._leave()
        try:
            async with asyncio.timeout(self._limits.linger_s):
                await self._outgoing.empty.wait()
        except TimeoutError:
            self.abort(TransportError(f"{self.local} has closed the stream"))

    def abort(self, error: BloomBeeError) -> None:
        """Break both ways at once: both ends raise `error`, what was not read is lost."""
        if self._dead:
            return
        self._outgoing.fail(error)
        self._incoming.fail(error)
        self._leave()

    def die(self) -> None:
        """End our end only: our process died and the other end can't hear of it yet."""
        self._closed = self._dead = True
        self._incoming.queue.close()
        self._leave()

    def bury(self) -> None:
        """Let the other end hear of what `die` did."""
        self._dead = False
        self.abort(TransportError(f"the connection to {self.local} was reset"))

    def reset(self) -> None:
        """Break both ways, as a middlebox or a failing link does."""
        self.abort(TransportError(f"the connection {self.local} > {self.remote} was reset"))

    def end(self) -> None:
        """End both ways in order after what is under way, though neither end asked for it."""
        for way in (self._outgoing, self._incoming):
            if not way.queue.ended:
                way.push(None)
        self._leave()

    def _leave(self) -> None:
        for owner in self.owners:
            owner.pop(self, None)

    def flush(self) -> None:
        """Deliver what waited for a cut link."""
        self._outgoing.flush()
        self._incoming.flush()


def connected_streams(
    dialer: _End,
    listener: _End,
    *,
    clock: Clock,
    owners: tuple[Owner, Owner],
) -> tuple[MemoryStream, MemoryStream]:
    """The two ends of a new stream, each given as (peer, link away from it, its limits).

    Both ends join `owners[0]`, the dialer's also `owners[1]`, until they end.
    """
    (near_peer, out_link, near_limits), (far_peer, back_link, far_limits) = dialer, listener
    out, back = _Way(out_link, clock, far_limits), _Way(back_link, clock, near_limits)
    near = MemoryStream(near_peer, far_peer, (out, back), near_limits)
    far = MemoryStream(far_peer, near_peer, (back, out), far_limits)
    near.peer_limits, far.peer_limits = far_limits, near_limits
    near.owners, far.owners = owners, owners[:1]
    owners[0].update({near: None, far: None})
    owners[1][near] = None
    return near, far
