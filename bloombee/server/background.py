"""Blocking work beside the event loop, in a thread that never keeps the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 1.0


async def in_background(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a daemon thread of its own.

    When this is cancelled, `work` gets PATIENCE_S to end and is left behind then:
    a server told to stop doesn't wait for gigabytes of weights.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, name="background", daemon=True).start()
    ended = asyncio.wrap_future(outcome)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        await asyncio.wait([ended], timeout=PATIENCE_S)
        if not ended.cancel() and not ended.cancelled():
            ended.exception()  # seen, so that asyncio doesn't report it
        raise
