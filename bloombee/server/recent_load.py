"""How much of the last seconds the compute thread computed."""

from __future__ import annotations

import threading
from collections import deque

WINDOW_US = 5_000_000


class RecentLoad:
    """Passes of the last WINDOW_US. Noted on the compute thread, read on any."""

    def __init__(self, began_us: int) -> None:
        self._began_us = began_us
        self._passes: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def note(self, started_us: int, spent_us: int) -> None:
        """A pass has ended."""
        with self._lock:
            self._passes.append((started_us, started_us + spent_us))
            self._forget(started_us + spent_us)

    def share(self, now_us: int) -> float:
        """Between 0 and 1; of the time since the start while that is short."""
        since_us = max(self._began_us, now_us - WINDOW_US)
        with self._lock:
            self._forget(now_us)
            busy_us = sum(end - max(start, since_us) for start, end in self._passes)
        return min(1.0, busy_us / max(1, now_us - since_us))

    def _forget(self, now_us: int) -> None:
        while self._passes and self._passes[0][1] <= now_us - WINDOW_US:
            self._passes.popleft()
