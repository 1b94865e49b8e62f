"""The event loop that all clients of a process share, in a thread of its own.

Callers are ordinary code: scripts, notebook cells, coroutines of another loop.
`run` hands a coroutine over and waits for its result in the calling thread; an
interrupt there (Ctrl-C) cancels the coroutine and waits until it has cleaned up.
Long-lived work (readers of streams) goes into the loop's task group by `spawn`.
The thread is a daemon, and `close` is registered with `atexit`, so that an
interpreter that ends never waits for a peer.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

import uvloop

from bloombee.errors import BloomBeeError, RequestError

Result = TypeVar("Result")
Item = TypeVar("Item")
Work = Coroutine[Any, Any, None]

_log = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
CLOSE_GRACE_S = 5.0


class _Call(Generic[Result]):
    """One coroutine on its way through the loop; `done` is free once it has ended."""

    __slots__ = ("_coroutine", "_ended", "_error", "_task", "_value", "done")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Result], ended: Callable[[], object] = lambda: None
    ) -> None:
        self.done = threading.Lock()
        self.done.acquire()
        self._ended = ended
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._value: Result | None = None
        self._error: BaseException | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin, in the loop's thread."""
        if self._error is None:
            self._task = tasks.create_task(self._drive())
            self._task.add_done_callback(self._end)

    def cancel(self, error: BaseException) -> None:
        """Stop it, in the loop's thread, or keep it from starting."""
        if self._task is not None:
            self._task.cancel()
        elif self._error is None:
            self._error = error
            self._end()

    async def _drive(self) -> None:
        try:
            self._value = await self._coroutine
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error

    def _end(self, task: asyncio.Task[None] | None = None) -> None:
        # A task cancelled before its first step never entered the coroutine.
        self._coroutine.close()
        if task is not None and task.cancelled():
            self._error = asyncio.CancelledError()
        self.done.release()
        self._ended()

    @property
    def has_result(self) -> bool:
        """Whether it ran to its end."""
        return self._task is not None and self._task.done() and self._error is None

    def result(self) -> Result:
        """What the coroutine returned; raises what it raised."""
        if isinstance(self._error, asyncio.CancelledError):
            raise RequestError("the client was closed before the call was answered")
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType] - set when there is no error


class LoopThread:
    """An event loop with a root task group in a daemon thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._ready = threading.Event()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="bloombee-client", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._hold_tasks())
        finally:
            # After a bug in one of its tasks, too, which the thread's end tells of.
            self._closed = True
            self._loop.close()

    async def _hold_tasks(self) -> None:
        self._stop = asyncio.Event()
        async with asyncio.TaskGroup() as self._tasks:
            self._ready.set()
            await self._stop.wait()
            current = asyncio.current_task()
            for task in asyncio.all_tasks():
                if task is not current:
                    task.cancel()

    @property
    def tasks(self) -> asyncio.TaskGroup:
        """The root task group; use it in the loop's thread only. Its tasks must not raise."""
        return self._tasks

    @property
    def is_open(self) -> bool:
        """Whether coroutines can still be run: not closed, and in the process that started it."""
        return not self._closed and self._process == os.getpid()

    def run(
        self,
        coroutine: Coroutine[Any, Any, Result],
        undo: Callable[[Result], Coroutine[Any, Any, object]] | None = None,
    ) -> Result:
        """Run `coroutine` in the loop and wait for its result.

        `undo` disposes of a result that an interrupt kept from the caller. Raises what
        the coroutine raises; KeyboardInterrupt when this thread is interrupted (the
        coroutine is cancelled first); RequestError when called in the loop's own
        thread, which would wait for itself, in a forked child, which has no such thread,
        or when the loop was closed.
        """
        self._check_thread(coroutine)
        call = _Call(coroutine)
        self._loop.call_soon_threadsafe(call.start, self._tasks)
        try:
            call.done.acquire()
        except BaseException as interrupt:
            self._loop.call_soon_threadsafe(call.cancel, interrupt)
            if call.done.acquire(timeout=CANCEL_GRACE_S) and call.has_result and undo is not None:
                self.post(undo(call.result()))
            raise
        return call.result()

    def stream(self, work: Callable[[Callable[[Item], None]], Work]) -> Generator[Item]:
        """What a coroutine of the loop passes to its argument, in the calling thread.

        Ending the iteration, or interrupting it, cancels the coroutine first. Raises as `run`.
        """
        inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        coroutine = work(inbox.put)
        self._check_thread(coroutine)
        call = _Call(coroutine, lambda: inbox.put(None))
        self._loop.call_soon_threadsafe(call.start, self._tasks)
        try:
            while (item := inbox.get()) is not None:
                yield item
        except BaseException as interrupt:
            self._loop.call_soon_threadsafe(call.cancel, interrupt)
            call.done.acquire(timeout=CANCEL_GRACE_S)
            raise
        call.result()

    def begin(self, coroutine: Work, ended: Callable[[], object]) -> Begun:
        """Start `coroutine`, for a caller in any event loop; `ended` is called in ours.

        Raises RequestError in a forked child, or when the loop was closed.
        """
        if not self.is_open:
            coroutine.close()
            raise RequestError(f"can't reach the swarm here: {self._obstacle()}")
        call = _Call(coroutine, ended)
        self._loop.call_soon_threadsafe(call.start, self._tasks)
        return Begun(self, call)

    def cancel(self, call: _Call[Any]) -> None:
        """End what was begun, unless it has ended. Does not wait."""
        if self.is_open:
            self._loop.call_soon_threadsafe(call.cancel, asyncio.CancelledError())

    def _check_thread(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if not self.is_open or threading.current_thread() is self._thread:
            coroutine.close()
            raise RequestError(f"can't wait for the swarm here: {self._obstacle()}")

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Start `coroutine` and don't wait: what finalizers use. Drops it once closed."""
        if not self.is_open:
            coroutine.close()
            return
        self._loop.call_soon_threadsafe(_Call(_reported(coroutine)).start, self._tasks)

    def _obstacle(self) -> str:
        if self._process != os.getpid():
            return "this process was forked after the model was loaded; load the model in it"
        return "the client is closed" if self._closed else "called from the client's own loop"

    def close(self) -> None:
        """Cancel all tasks and end the thread; waits for a few seconds at most."""
        if not self.is_open:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_GRACE_S)


class Begun:
    """A coroutine that runs in a `LoopThread`."""

    def __init__(self, loop: LoopThread, call: _Call[None]) -> None:
        self._loop = loop
        self._call = call

    def cancel(self) -> None:
        """End it, unless it has ended. Does not wait."""
        self._loop.cancel(self._call)

    def check(self) -> None:
        """Raise what it raised; it has ended."""
        self._call.result()


async def _reported(work: Coroutine[Any, Any, object]) -> None:
    """Run `work`, for whose result or error nobody waits."""
    try:
        await work
    except BloomBeeError as error:
        _log.warning("in the background: %s", error)
    except Exception:  # noqa: BLE001 - there is nobody to raise it to
        _log.exception("a bug in the background")


@functools.cache
def _loop_of_process(process_id: int) -> LoopThread:
    del process_id  # the key: a forked child must not use its parent's thread
    loop = LoopThread()
    atexit.register(loop.close)
    return loop


def shared_loop() -> LoopThread:
    """The loop of this process, started on first use."""
    return _loop_of_process(os.getpid())
