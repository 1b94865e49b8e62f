"""Tasks that belong to the server and not to a stream.

Each of them deals with the errors of our tree itself. Any other exception is a bug, and
so is one that leaves a callback of ours: `failed` hands the first one to whoever runs
the server, which is to stop then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from bloombee.telemetry.faults import is_ours

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Holds tasks until they end; `stop` leaves none behind."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._bug: asyncio.Future[Exception] | None = None
        self._stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task of the running loop; after `stop` it is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        if self._stopping:
            task.cancel()
        return task

    async def failed(self) -> Exception:
        """The first bug that a task or a callback of the loop met; waits until there is one.

        While it waits it is the loop's exception handler.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._heard)
        try:
            return await asyncio.shield(self._first_bug())
        finally:
            loop.set_exception_handler(None)

    def _heard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what nobody awaited; a callback has no stream that could end with it."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception) and is_ours(error):
            self._note(error)

    async def stop(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self._stopping = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.critical("a bug ended the task %s", task.get_name(), exc_info=error)
        self._note(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _note(self, error: Exception) -> None:
        bug = self._first_bug()
        if not bug.done():
            bug.set_result(error)

    def _first_bug(self) -> asyncio.Future[Exception]:
        if self._bug is None:
            self._bug = asyncio.get_running_loop().create_future()
        return self._bug
