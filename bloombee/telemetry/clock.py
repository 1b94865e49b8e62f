"""The clock: monotonic, for durations only; its zero means nothing."""

from __future__ import annotations

import asyncio
from time import perf_counter, perf_counter_ns, thread_time_ns


def now_s() -> float:
    """Seconds on the monotonic clock."""
    return perf_counter()


def now_us() -> int:
    """Microseconds on the monotonic clock."""
    return perf_counter_ns() // 1000


def loop_us() -> int:
    """Microseconds on the clock of the running loop, or of a loop that rounds its own: on ours.

    Both run at the same pace; a loop of the tests may have a time of its own.
    """
    loop = asyncio.get_running_loop()
    return int(loop.time() * 1e6) if isinstance(loop, asyncio.BaseEventLoop) else now_us()


def cpu_us() -> int:
    """Microseconds of processor time that this thread has had."""
    return thread_time_ns() // 1000


class Stopwatch:
    """Time since it was made or last restarted."""

    __slots__ = ("_started_ns",)

    def __init__(self) -> None:
        self._started_ns = perf_counter_ns()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return (perf_counter_ns() - self._started_ns) / 1e9

    @property
    def elapsed_us(self) -> int:
        """Microseconds so far."""
        return (perf_counter_ns() - self._started_ns) // 1000

    def lap_us(self) -> int:
        """Microseconds so far; starts again from zero."""
        now_ns = perf_counter_ns()
        lap_us = (now_ns - self._started_ns) // 1000
        self._started_ns = now_ns
        return lap_us
