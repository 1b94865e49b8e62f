"""A bounded queue of frames between two tasks, with an end and a way to break."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloombee.errors import BloomBeeError


class FrameQueue:
    """FIFO that holds up to `limit_bytes`, or one frame of any size; one task reads.

    A producer awaits `room`, then `reserve`s and `deliver`s (or `put`s, which is
    both at once). What is reserved but not delivered is on its way and counts.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._frames: deque[bytes] = deque()
        self._ended = False
        self._discarding = False
        self._error: BloomBeeError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or on its way, and more may come."""
        return not (self._held_bytes or self._ended or self._error)

    @property
    def ended(self) -> bool:
        """Whether it was ended, closed or broken: nothing more goes in."""
        return self._ended or self._error is not None

    async def room(self) -> None:
        """Wait until there is room for a frame; raises the error that broke the queue."""
        while self._held_bytes >= self._limit_bytes and not self.ended:
            waiter = asyncio.get_running_loop().create_future()
            self._writers.append(waiter)
            await waiter
        if self._error is not None:
            raise self._error.with_traceback(None)

    def reserve(self, size: int) -> None:
        """Count a frame of `size` bytes that will be delivered later."""
        self._held_bytes += size

    def deliver(self, frame: bytes) -> None:
        """Make a reserved frame readable; dropped after `close` or `fail`."""
        if self._discarding:
            self._release(len(frame))
            return
        self._frames.append(frame)
        self._wake_reader()

    def put(self, frame: bytes) -> None:
        """Reserve and deliver at once."""
        self.reserve(len(frame))
        self.deliver(frame)

    async def get(self) -> bytes | None:
        """The next frame, or None after the last; raises the error that broke the queue."""
        while not self._frames and not self.ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._frames:
            frame = self._frames.popleft()
            self._release(len(frame))
            return frame
        if self._error is not None:
            raise self._error.with_traceback(None)
        return None

    def end(self) -> None:
        """Nothing follows: `get` returns what is queued, then None."""
        if self._error is None:
            self._ended = True
        self._wake()

    def close(self) -> None:
        """The reader has gone: drop what is queued and whatever still comes."""
        self.end()
        self._discard()

    def fail(self, error: BloomBeeError, *, keep_queued: bool = False) -> None:
        """Break: both ends raise `error`, unless it had ended before.

        What is queued is dropped, or with `keep_queued` still read before the error.
        """
        if not self.ended:
            self._error = error
            if not keep_queued:
                self._discard()
        self._wake()

    def _discard(self) -> None:
        self._discarding = True
        self._held_bytes -= sum(map(len, self._frames))
        self._frames.clear()

    def _release(self, size: int) -> None:
        self._held_bytes -= size
        if self._writers and self._held_bytes < self._limit_bytes:
            self._wake_writers()

    def _wake(self) -> None:
        self._wake_reader()
        self._wake_writers()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        waiters, self._writers = self._writers, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
