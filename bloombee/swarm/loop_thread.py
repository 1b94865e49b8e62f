"""An asyncio loop in a thread of its own, called from any other loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from bloombee.errors import DeadlineExceeded
from bloombee.telemetry.faults import is_ours

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Coroutine

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class LoopThread:
    """Runs coroutines in a background thread; ends with the process if not stopped.

    The loop is asyncio's own, whatever policy the program uses: hivemind needs no
    other, and its subprocess and pipe support doesn't depend on the main thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.stop, 1.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def run(
        self, work: Coroutine[Any, Any, Result], what: str, deadline_s: float | None
    ) -> Result:
        """Await `work` in the thread; cancelling this cancels it.

        Raises DeadlineExceeded that names `what` after `deadline_s` (None: no limit),
        and whatever `work` raises.
        """

        async def bounded() -> Result:
            try:
                async with asyncio.timeout(deadline_s):
                    return await work
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{what} took longer than {deadline_s:g} s; "
                    "check the network to the swarm and try again"
                ) from error

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(bounded(), self._loop))

    def begin(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Run `work` in the thread until it ends or the thread stops, which cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, deadline_s: float) -> None:
        """Cancel what runs and end the thread, waiting up to `deadline_s`; may be repeated."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline_s)
        atexit.unregister(self.stop)


def _report(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """hivemind leaves tasks behind whose failures nobody reads; ours are bugs."""
    error = context.get("exception")
    ours = isinstance(error, BaseException) and is_ours(error)
    level = logging.ERROR if ours else logging.DEBUG
    _log.log(level, "in the DHT loop: %s", context.get("message"), exc_info=error)
