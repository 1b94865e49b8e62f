"""An event loop whose time jumps to the next timer, so that seconds of waiting cost nothing.

`run(main())` is `asyncio.run` on it. Everything that asks the loop for time
follows: sleeps, timeouts, and the delays of `transport.memory`. A test that would
wait for ever fails at once. Work in other threads does not stop the clock: give
`patience_s`, the real time to wait for it before each jump.

Runs are repeatable: tasks hash by the order in which they were made, so that
sets of them (a task group that cancels its tasks) have one order too.

Code that runs in the context of a `process` can be frozen, as SIGSTOP would do it:
none of its callbacks and timers run until it is thawed, and then all of them do, in
the order in which they came due. What others send it meanwhile waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import selectors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterator

T = TypeVar("T")

MOST_TURNS = 100_000
"""Turns of the loop in a row without waiting: more is work that goes round in circles."""

_PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("process", default="")


@contextmanager
def process(name: str) -> Iterator[None]:
    """Tasks and timers made inside belong to process `name`, as do those that they make."""
    token = _PROCESS.set(name)
    try:
        yield
    finally:
        _PROCESS.reset(token)


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self._patience_s = patience_s
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self._turns += 1
            if self._turns > MOST_TURNS:
                self._turns = 0
                raise RuntimeError(f"busy for {MOST_TURNS} turns at {self.now:g} s: no progress")
            return super().select(0)
        self._turns = 0
        ready = super().select(self._patience_s)
        if not ready and timeout is None:
            raise RuntimeError("every task waits and no timer is set: deadlock")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class _OrderedTask(asyncio.Task[T]):
    """A task that hashes by its number, not by its address."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, T], **settings: Any) -> None:
        self._number = number
        super().__init__(coroutine, **settings)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Due:
    """A callback that its process runs, or keeps for later while it is frozen."""

    __slots__ = ("_args", "_callback", "_loop", "_process", "context", "handle")

    def __init__(
        self,
        loop: VirtualTimeLoop,
        process: str,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self._loop = loop
        self._process = process
        self._callback = callback
        self._args = args
        self.context = context or contextvars.copy_context()
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self._loop.keep(self._process, self):
            return
        if self.handle is None or not self.handle.cancelled():
            self._callback(*self._args)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at time 0; `time()` is virtual seconds."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self._jumping = _JumpingSelector(patience_s)
        self._frozen: dict[str, list[_Due]] = {}
        super().__init__(self._jumping)
        self._tasks_made = itertools.count()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._jumping.now

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **settings: Any,
    ) -> asyncio.Task[T]:
        assert asyncio.iscoroutine(coroutine)
        return _OrderedTask(next(self._tasks_made), coroutine, loop=loop, **settings)

    def freeze(self, process: str) -> None:
        """Run nothing of `process` from now on."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: str) -> None:
        """Run what came due since `freeze`, and go on."""
        for due in self._frozen.pop(process, []):
            super().call_soon(due, context=due.context)

    def thaw_all(self) -> None:
        """Thaw every process."""
        for name in list(self._frozen):
            self.thaw(name)

    def keep(self, process: str, due: _Due) -> bool:
        """Whether `process` is frozen; `due` is kept for it then."""
        kept = self._frozen.get(process)
        if kept is None:
            return False
        kept.append(due)
        return True

    # Both signatures are the base class's.

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self._frozen:
            name = _PROCESS.get() if context is None else context.get(_PROCESS, "")
            if name in self._frozen:
                due = _Due(self, name, callback, args, context)
                due.handle = super().call_soon(due, context=due.context)
                return due.handle
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        name = _PROCESS.get() if context is None else context.get(_PROCESS, "")
        if not name:
            return super().call_at(when, callback, *args, context=context)
        due = _Due(self, name, callback, args, context)
        due.handle = timer = super().call_at(when, due, context=due.context)
        return timer


def run(main: Coroutine[Any, Any, T], *, patience_s: float = 0.0) -> T:
    """Run `main` to its end in virtual time; who is still frozen then ends too."""
    loop = VirtualTimeLoop(patience_s)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main)
        finally:
            loop.thaw_all()
