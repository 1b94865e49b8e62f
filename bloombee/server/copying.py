"""How long rows take between host and device, in one forward pass.

A GPU is asked by events in its own queue, which are read when the rows have come to the host:
that is waited for anyway. When none come nothing is waited for, and none of it counts.
"""

from __future__ import annotations

from typing import Protocol

import torch

from bloombee.telemetry import now_us


class CopyClock(Protocol):
    """Made before the rows go to the device."""

    def copied(self) -> None:
        """They are there, or on their way."""
        ...

    def computed(self) -> None:
        """What follows brings rows back to the host."""
        ...

    def ended(self, *, came_back: bool) -> int:
        """How long both ways took together, in microseconds, if rows are on the host now."""
        ...


class HostCopies:
    """Where the device is the host: what making the rows fit takes."""

    __slots__ = ("_back_us", "_start_us", "_there_us")

    def __init__(self) -> None:
        self._start_us = now_us()
        self._there_us = self._back_us = 0

    def copied(self) -> None:
        """See `CopyClock`."""
        self._there_us = now_us() - self._start_us

    def computed(self) -> None:
        """See `CopyClock`."""
        self._back_us = now_us()

    def ended(self, *, came_back: bool) -> int:  # noqa: ARG002 - nothing is waited for
        """See `CopyClock`."""
        return self._there_us + now_us() - self._back_us


class CudaCopies:
    """Between a GPU and its host, in the order of the device's current stream."""

    __slots__ = ("_device", "_events")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def copied(self) -> None:
        """See `CopyClock`."""
        self._mark()

    def computed(self) -> None:
        """See `CopyClock`."""
        self._mark()

    def ended(self, *, came_back: bool) -> int:
        """See `CopyClock`. Rows that came back were waited for: the stream is empty then."""
        if not came_back:
            return 0
        start, there, back = self._events
        self._mark()
        end = self._events[-1]
        end.synchronize()
        return int(1000 * (start.elapsed_time(there) + back.elapsed_time(end)))

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)


def copy_clock(device: torch.device) -> CopyClock:
    """The clock of one pass on `device`."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
