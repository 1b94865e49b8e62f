"""Timing, counting, logging and progress: one line at the call site; the only timing code."""

from bloombee.telemetry.clock import Stopwatch, cpu_us, loop_us, now_s, now_us
from bloombee.telemetry.logs import configure_logging
from bloombee.telemetry.progress import Progress
from bloombee.telemetry.registry import Counter, Registry, Timer

__all__ = [
    "Counter",
    "Progress",
    "Registry",
    "Stopwatch",
    "Timer",
    "configure_logging",
    "cpu_us",
    "loop_us",
    "now_s",
    "now_us",
]
