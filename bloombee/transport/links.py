"""What the links of a `MemoryNetwork` do to the frames that cross them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import contextvars


class Clock(Protocol):
    """Time and timers; an asyncio event loop is one."""

    def time(self) -> float:
        """Seconds, from any origin."""
        ...

    def call_later(self, delay: float, callback: Callable[..., Any], /, *args: Any) -> object:
        """Call `callback(*args)` in the event loop's thread after `delay` seconds."""
        ...


class NetworkClock:
    """A clock whose timers run in the network's context, not in that of who sends."""

    def __init__(self, clock: Clock, context: contextvars.Context) -> None:
        self._clock = clock
        self._context = context

    def time(self) -> float:
        """Seconds, from any origin."""
        return self._clock.time()

    def call_later(self, delay: float, callback: Callable[..., Any], /, *args: Any) -> object:
        """As `Clock.call_later`."""
        return self._context.run(self._clock.call_later, delay, callback, *args)


class Fate(StrEnum):
    """What becomes of one frame.

    `SWAP`: the next frame of its stream overtakes it, if one comes soon. `RESET`: its
    stream breaks, `CLOSE`: its stream ends in order, both without our doing.
    """

    DELIVER = "deliver"
    DROP = "drop"
    REPEAT = "repeat"
    SWAP = "swap"
    RESET = "reset"
    CLOSE = "close"


Observer = Callable[[str, str, bytes], Fate | None]
"""Sees each frame as it is sent (source, target, frame); may decide its fate."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction between two peers.

    Each frame takes `delay_s` plus up to `jitter_s` (order is kept), and its size
    over `bytes_per_s` (None: no limit), which all streams of the link share. With
    probability `loss` a frame breaks its stream, as a reset connection would; with
    those of `drop`, `repeat` and `swap` it vanishes, comes twice, or comes after its
    successor.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    loss: float = 0.0
    drop: float = 0.0
    repeat: float = 0.0
    swap: float = 0.0

    @property
    def _risks(self) -> tuple[tuple[float, Fate], ...]:
        return (
            (self.loss, Fate.RESET),
            (self.drop, Fate.DROP),
            (self.repeat, Fate.REPEAT),
            (self.swap, Fate.SWAP),
        )

    def fate(self, luck: Callable[[], float]) -> Fate:
        """The next frame's, by one number of `luck` in [0, 1) if anything can go wrong."""
        if not (self.loss or self.drop or self.repeat or self.swap):
            return Fate.DELIVER
        number = luck()
        for risk, fate in self._risks:
            number -= risk
            if number < 0:
                return fate
        return Fate.DELIVER


class Link:
    """The state of one direction between two peers: when it is free, and its luck."""

    def __init__(
        self, seed: int, ends: tuple[str, str], shape: LinkShape, observer: Observer
    ) -> None:
        self.shape = shape
        self.cut = False
        self._source, self._target = source, target = ends
        self._observer = observer
        self._random = random.Random(f"{seed}:{source}>{target}")
        self._free_at = 0.0

    def fate(self, frame: bytes) -> Fate:
        """What becomes of a frame: what the observer says, else what the shape's luck does."""
        decided = self._observer(self._source, self._target, frame)
        return decided or self.shape.fate(self._random.random)

    def arrival(self, now: float, size: int) -> float:
        """When a frame of `size` bytes sent `now` arrives; occupies the link meanwhile."""
        delay = self.shape.delay_s
        if self.shape.jitter_s:
            delay += self._random.uniform(0.0, self.shape.jitter_s)
        if self.shape.bytes_per_s is None:
            return now + delay
        self._free_at = max(now, self._free_at) + size / self.shape.bytes_per_s
        return self._free_at + delay
