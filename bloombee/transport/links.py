"""What the links of a `MemoryNetwork` do to the frames that cross them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    """Time and timers; an asyncio event loop is one."""

    def time(self) -> float:
        """Seconds, from any origin."""
        ...

    def call_later(self, delay: float, callback: Callable[..., Any], /, *args: Any) -> object:
        """Call `callback(*args)` in the event loop's thread after `delay` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction between two peers.

    Each frame takes `delay_s` plus up to `jitter_s` (order is kept), and its size
    over `bytes_per_s` (None: no limit), which all streams of the link share. With
    probability `loss` a frame breaks its stream, as a reset connection would.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    loss: float = 0.0


class Link:
    """The state of one direction between two peers: when it is free, and its luck."""

    def __init__(self, seed: int, source: str, target: str, shape: LinkShape) -> None:
        self.shape = shape
        self.cut = False
        self._random = random.Random(f"{seed}:{source}>{target}")
        self._free_at = 0.0

    def loses(self) -> bool:
        """Whether the next frame breaks its stream."""
        return self.shape.loss > 0 and self._random.random() < self.shape.loss

    def arrival(self, now: float, size: int) -> float:
        """When a frame of `size` bytes sent `now` arrives; occupies the link meanwhile."""
        delay = self.shape.delay_s
        if self.shape.jitter_s:
            delay += self._random.uniform(0.0, self.shape.jitter_s)
        if self.shape.bytes_per_s is None:
            return now + delay
        self._free_at = max(now, self._free_at) + size / self.shape.bytes_per_s
        return self._free_at + delay
