"""How a listener of any transport runs its handler on an accepted stream."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from bloombee.errors import BloomBeeError, TransportError
from bloombee.transport.interface import Stream

if TYPE_CHECKING:
    import asyncio

    from bloombee.transport.interface import StreamHandler
    from bloombee.transport.tasks import TaskOwner

_log = logging.getLogger(__name__)


class BreakableStream(Stream, Protocol):
    """A stream that its own transport can break."""

    def abort(self, error: BloomBeeError) -> None:
        """Break it for both ends at once; what was not read is lost."""
        ...


def start(owner: TaskOwner, handler: StreamHandler, stream: BreakableStream) -> None:
    """Run `handler` in a task of `owner`; close the stream when it returns, else break it."""

    def ended(task: asyncio.Task[None]) -> None:
        # Also when the task was cancelled before it took its first step.
        if task.cancelled() or task.exception() is not None:
            stream.abort(TransportError("the handler of the stream was stopped or failed"))

    owner.spawn(_serve(handler, stream)).add_done_callback(ended)


async def _serve(handler: StreamHandler, stream: BreakableStream) -> None:
    try:
        await handler(stream)
    except BloomBeeError as error:
        # Errors of our tree are about this stream alone and end with it.
        _log.debug("stream with %s ended: %s", stream.remote, error)
        stream.abort(TransportError(f"the handler of the stream ended with: {error}"))
    else:
        await stream.close()
