"""An event loop whose time jumps to the next timer, so that seconds of waiting cost nothing.

`run(main())` is `asyncio.run` on it. Everything that asks the loop for time
follows: sleeps, timeouts, and the delays of `transport.memory`. A test that would
wait for ever fails at once. Work in other threads does not stop the clock: give
`patience_s`, the real time to wait for it before each jump.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self._patience_s = patience_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        ready = super().select(self._patience_s)
        if not ready and timeout is None:
            raise RuntimeError("every task waits and no timer is set: deadlock")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at time 0; `time()` is virtual seconds."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self._jumping = _JumpingSelector(patience_s)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T], *, patience_s: float = 0.0) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(patience_s)) as runner:
        return runner.run(main)
