"""An owner for tasks that outlive the coroutine that starts them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class TaskOwner:
    """Holds tasks until they end; `stop` leaves none behind.

    A task group belongs to one coroutine and can't be left open between `start`
    and `stop` of an object; this can. A task's own exception goes to the loop's
    exception handler, since nobody awaits it.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task of the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, without waiting for them."""
        for task in self._tasks:
            task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the tasks, then cancel them and wait until they ended."""
        tasks = self._tasks - {_current()}
        if tasks and grace_s > 0:
            _, tasks = await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "a task of the transport failed", "exception": error, "task": task}
            )


def _current() -> asyncio.Task[Any] | None:
    return asyncio.current_task()
