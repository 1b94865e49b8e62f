"""How much of the way of steps to here the device waited for; used on the compute thread only."""

from __future__ import annotations

from collections import deque

MOST_PASSES = 512
"""How many of the last passes are known; of what was on its way before them nothing counts."""


class Exposure:
    """Passes of the device, and when steps were on their way to it, in microseconds.

    Time in which several steps were on their way counts for the one that came first.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[int, int]] = deque(maxlen=MOST_PASSES)
        self._counted_us = 0

    def computed(self, start_us: int, end_us: int) -> None:
        """The device was busy."""
        self._passes.append((start_us, end_us))

    def of(self, arrived_us: int, wire_us: int) -> int:
        """Of the `wire_us` before a step came, those in which the device had nothing to do.

        What it says of is counted from then on, so ask once a step.
        """
        start_us = max(arrived_us - wire_us, self._counted_us)
        if len(self._passes) == MOST_PASSES:
            start_us = max(start_us, self._passes[0][0])
        if start_us >= arrived_us:
            return 0
        self._counted_us = arrived_us
        busy_us = 0
        for began_us, ended_us in reversed(self._passes):
            if ended_us <= start_us:
                break
            busy_us += max(0, min(ended_us, arrived_us) - max(began_us, start_us))
        return arrived_us - start_us - busy_us
