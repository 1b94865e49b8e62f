"""A line of one rate, with one queue that drops at its tail. Knows no clock.

Time is virtual: a line remembers when it will have sent all it took, so a packet's times
are known when it comes, and nothing wakes up for a queue.
"""

from __future__ import annotations

from math import inf


class Line:
    """Sends packets one after the other; keeps the seconds it was busy."""

    __slots__ = ("_free_s", "_limit_bytes", "_queue_bytes", "_queue_s", "busy_s", "rate")

    def __init__(self, rate: float, queue_s: float, queue_bytes: float = 0.0) -> None:
        self._queue_s = queue_s
        self._queue_bytes = queue_bytes
        self._free_s = 0.0
        self.busy_s = 0.0
        self.set_rate(rate)

    def set_rate(self, rate: float) -> None:
        """Bytes a second from now on; what is queued keeps its times."""
        self.rate = rate
        self._limit_bytes = self._queue_bytes or (0.0 if rate == inf else rate * self._queue_s)

    def take(self, first_s: float, last_s: float, size: int) -> tuple[float, float] | None:
        """When a packet's first and last byte leave, of which they come at these times.

        None when the queue has no room for it; an empty queue takes any packet. A
        packet is passed on while it still comes in, so that two lines of one rate
        in a row cost the time of one.
        """
        rate = self.rate
        if rate == inf:
            return first_s, last_s
        wait_s = self._free_s - first_s
        if wait_s > 0.0:
            if wait_s * rate + size > self._limit_bytes:
                return None
            first_s = self._free_s
        took_s = size / rate
        self.busy_s += took_s
        end_s = self._free_s = first_s + took_s
        return first_s, (end_s if end_s > last_s else last_s)
