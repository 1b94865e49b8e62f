"""The client's streams to the stages of one session: opening, listening, closing.

One stream goes to every stage. Steps leave on the first, outputs come back on
the last, and any of them may tell of a failure. Each stream has one reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from bloombee.core import PeerId, Route, Stage
from bloombee.errors import (
    BloomBeeError,
    DeadlineExceeded,
    ProtocolError,
    TransportError,
    from_code,
)
from bloombee.protocol.messages import AnyMessage, Close, Closed, Failed, Hop, Open, Opened
from bloombee.swarm.connection import Connection
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)

TRY_AGAIN = "try again: another route is taken if other servers hold these blocks"

Connect = Callable[[Endpoint], Awaitable[Connection]]
"""Opens an authenticated connection, under a deadline of its own."""


class StageFailure(Exception):  # noqa: N818 - never leaves the client package
    """`error` happened at `peer` while a session was being opened."""

    def __init__(self, peer: PeerId, error: BloomBeeError) -> None:
        super().__init__(str(error))
        self.peer = peer
        self.error = error


@asynccontextmanager
async def deadline(seconds: float, what: str):
    """Turn a wait of more than `seconds` into DeadlineExceeded, which says for `what`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from None


class StageLink:
    """The stream to one stage."""

    def __init__(self, stage: Stage, endpoint: Endpoint, connection: Connection) -> None:
        self.stage = stage
        self.endpoint = endpoint
        self.connection = connection
        self.closed = asyncio.Event()
        self.reader: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"blocks {self.stage.span} at {self.stage.peer[-8:]}"

    @property
    def hop(self) -> Hop:
        """How the stage before finds this one."""
        to = self.endpoint
        return Hop(to.peer, to.address, to.certificate_hash)

    def told(self, failed: Failed) -> BloomBeeError:
        """The error that the stage reports, saying which stage it is."""
        return from_code(failed.code, f"{self}: {failed.message}")

    async def open(self, message: Open, deadline_s: float) -> Opened:
        """Reserve the session on this stage.

        Raises what the stage answers, TransportError, or DeadlineExceeded.
        """
        async with deadline(deadline_s, f"opening a session on {self}"):
            await self.connection.send(message)
            received = await self.connection.receive()
        if received is None:
            raise TransportError(f"{self} closed the stream while a session was opened")
        match received[0]:
            case Opened() as opened:
                return opened
            case Failed() as failed:
                raise self.told(failed)
            case other:
                raise ProtocolError(f"{self} answered Open with {type(other).__name__}")

    async def listen(
        self,
        take: Callable[[StageLink, AnyMessage, memoryview], None],
        fail: Callable[[BloomBeeError], None],
    ) -> None:
        """Hand everything that arrives to `take`, until the stream ends; then call `fail`."""
        ended = TransportError(f"the connection to {self} ended; {TRY_AGAIN}")
        try:
            while (received := await self.connection.receive()) is not None:
                if isinstance(received[0], Closed):
                    self.closed.set()
                else:
                    take(self, *received)
        except BloomBeeError as error:
            mend = f"; {TRY_AGAIN}" if isinstance(error, TransportError) else ""
            ended = type(error)(f"{self}: {error}{mend}")
        finally:
            self.closed.set()
            fail(ended)

    async def close(self, session: bytes, deadline_s: float) -> None:
        """Tell the stage that the session is over, and end the stream. Never raises."""
        try:
            async with asyncio.timeout(deadline_s):
                if not self.closed.is_set():
                    await self.connection.send(Close(session))
                    if self.reader is not None:
                        await self.closed.wait()
        except (BloomBeeError, TimeoutError) as error:
            _log.debug("closing the session on %s: %s", self, error)
        finally:
            if self.reader is not None:
                self.reader.cancel()
            await self.connection.close()


async def connect_stages(
    route: Route, endpoints: Sequence[Sequence[Endpoint]], connect: Connect
) -> list[StageLink]:
    """A stream to every stage, all dialed at once; `endpoints` are each stage's, best first.

    Raises StageFailure for the first that can't be reached; the others are closed.
    """
    links: list[StageLink | None] = [None] * len(route.stages)

    async def reach(index: int) -> None:
        links[index] = await _connect_any(route.stages[index], endpoints[index], connect)

    reached = False
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(links)):
                tasks.create_task(reach(index))
        reached = True
    except BaseExceptionGroup as group:
        raise first_failure(group) from None
    finally:
        for link in () if reached else filter(None, links):
            await link.connection.close()
    return [link for link in links if link is not None]


def first_failure(error: BaseException) -> BaseException:
    """What made a task group fail: a StageFailure if there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_failure(each) for each in error.exceptions]
    return next((each for each in leaves if isinstance(each, StageFailure)), leaves[0])


async def _connect_any(stage: Stage, endpoints: Sequence[Endpoint], connect: Connect) -> StageLink:
    failure = TransportError(f"{stage.peer} announces no address")
    for endpoint in endpoints:
        try:
            return StageLink(stage, endpoint, await connect(endpoint))
        except BloomBeeError as error:
            failure = error
    named = f"can't reach blocks {stage.span} at {stage.peer[-8:]}: {failure}"
    raise StageFailure(stage.peer, type(failure)(named))
