"""The clock: monotonic, for durations only; its zero means nothing."""

from __future__ import annotations

from time import perf_counter, perf_counter_ns, thread_time_ns


def now_s() -> float:
    """Seconds on the monotonic clock."""
    return perf_counter()


def now_us() -> int:
    """Microseconds on the monotonic clock."""
    return perf_counter_ns() // 1000


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
