"""Keeping congestion windows open on connections that carry sessions.

A TCP connection that is idle longer than its retransmission timeout falls back
to its initial window, and the next large frame then takes several round trips
more (MEASURED 2). One byte every 100 ms prevents it. The sender's window is what
is lost, so each side keeps its own, and only where it has sent large frames. One
timer serves all connections of a listener or dialer, and rests when none is busy.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bloombee.transport.interface import TransportLimits


class Sender(Protocol):
    """A stream, as its connection's window sees it."""

    def keep_alive(self) -> bool:
        """Send the keep-alive frame unless frames wait already; False when it is closed."""
        ...


class Window:
    """One connection in the direction away from us."""

    def __init__(self, keeper: WindowKeeper) -> None:
        self.last_frame_s = 0.0
        self.last_byte_s = 0.0
        self.worth_keeping = False
        self._keeper = keeper
        self._senders: list[Sender] = []

    def join(self, sender: Sender) -> None:
        """A stream of this connection opened."""
        self._senders.append(sender)

    def leave(self, sender: Sender) -> None:
        """It ended."""
        self._senders.remove(sender)

    @property
    def unused(self) -> bool:
        """Whether no stream is left."""
        return not self._senders

    def sent(self, size_bytes: int) -> None:
        """A stream of this connection has sent a frame."""
        self._keeper.sent(self, size_bytes)

    def keep_alive(self) -> bool:
        """Send a byte on any open stream; False when there is none."""
        return any(sender.keep_alive() for sender in reversed(self._senders))


class WindowKeeper:
    """The windows of one listener or dialer, and their timer."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._windows: dict[object, Window] = {}
        self._busy: set[Window] = set()
        self._timer: asyncio.TimerHandle | None = None

    def window(self, connection: object) -> Window:
        """The window of a connection, named by anything hashable."""
        if connection not in self._windows:
            self._windows = {key: each for key, each in self._windows.items() if not each.unused}
            self._windows[connection] = Window(self)
        return self._windows[connection]

    def sent(self, window: Window, size_bytes: int) -> None:
        """Note a frame; from the first large one on, the window is kept open."""
        loop = asyncio.get_running_loop()
        window.last_frame_s = window.last_byte_s = loop.time()
        if size_bytes >= self._limits.keepalive_from_bytes:
            window.worth_keeping = True
        if window.worth_keeping:
            self._busy.add(window)
            if self._timer is None:
                self._timer = loop.call_later(self._period_s, self._tick, loop)

    def close(self) -> None:
        """Stop the timer."""
        self._busy.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _period_s(self) -> float:
        # Looking twice per interval keeps every gap below one interval.
        return self._limits.keepalive_s / 2

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for window in list(self._busy):
            if now - window.last_frame_s > self._limits.keepalive_after_s:
                self._rest(window)
            elif now - window.last_byte_s >= self._period_s * 0.9:
                if window.keep_alive():
                    window.last_byte_s = now
                else:
                    self._rest(window)
        self._timer = loop.call_later(self._period_s, self._tick, loop) if self._busy else None

    def _rest(self, window: Window) -> None:
        self._busy.discard(window)
        window.worth_keeping = False
