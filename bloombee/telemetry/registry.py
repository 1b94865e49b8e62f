"""Counters and timers by name, and a snapshot of them all.

Cheap rather than exact across threads: each counter or timer has one writer
(the event loop, or the compute thread); anyone may read.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        """Count `amount` more."""
        self.value += amount


class Timer:
    """How often something ran, and for how long: in total, at most and last."""

    __slots__ = ("count", "last_us", "max_us", "total_us")

    def __init__(self) -> None:
        self.count = 0
        self.total_us = 0
        self.max_us = 0
        self.last_us = 0

    def record(self, duration_us: int) -> None:
        """Count one run of `duration_us`."""
        self.count += 1
        self.total_us += duration_us
        self.last_us = duration_us
        self.max_us = max(self.max_us, duration_us)


class _Span:
    """Times the body of one `with` into a timer, also when it raises."""

    __slots__ = ("_started_ns", "_timer")

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._started_ns = 0

    def __enter__(self) -> None:
        self._started_ns = perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.record((perf_counter_ns() - self._started_ns) // 1000)


class Registry:
    """The counters and timers of one server or client, made at first use."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._timers: dict[str, Timer] = {}

    def counter(self, name: str) -> Counter:
        """The counter of that name; keep it where it is used often."""
        return self._counters.setdefault(name, Counter())

    def timer(self, name: str) -> Timer:
        """The timer of that name."""
        return self._timers.setdefault(name, Timer())

    def span(self, name: str) -> _Span:
        """`with registry.span("compute"):` times its body."""
        return _Span(self.timer(name))

    def snapshot(self) -> Mapping[str, int]:
        """All values now: counters by name, timers as `NAME_count`, `NAME_us` and `NAME_max_us`."""
        values = {name: counter.value for name, counter in self._counters.items()}
        for name, timer in self._timers.items():
            values[f"{name}_count"] = timer.count
            values[f"{name}_us"] = timer.total_us
            values[f"{name}_max_us"] = timer.max_us
        return values
