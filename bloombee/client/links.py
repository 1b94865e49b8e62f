"""The client's stream to one stage: opening, listening, signs of life, closing.

One stream goes to every stage. Steps leave on the first, outputs come back on the
last, and any of them may tell of a failure. Each stream has one reader, which runs
from the first Open on and hands what arrives to the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from bloombee.core import Stage
from bloombee.errors import (
    BloomBeeError,
    DeadlineExceeded,
    ProtocolError,
    TransportError,
    from_code,
)
from bloombee.protocol.framing import Buffer
from bloombee.protocol.link_estimate import LinkEstimator
from bloombee.protocol.machine import State
from bloombee.protocol.messages import (
    Acknowledged,
    AnyMessage,
    Beat,
    Close,
    Closed,
    Failed,
    Hop,
    Leaving,
    Open,
    Opened,
    Output,
    Standby,
)
from bloombee.protocol.pulse import Pulse
from bloombee.swarm.connection import Connection
from bloombee.swarm.measured import MeasuredLink, answer, asks
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)

Connect = Callable[[Endpoint], Awaitable[Connection]]
"""Opens an authenticated connection, under a deadline of its own."""


class Hearer(Protocol):
    """Who is told what arrives on a link. Nothing here may wait."""

    def hear_output(self, link: StageLink, output: Output, content: memoryview) -> None:
        """The stage answers a step."""
        ...

    def hear_failed(self, link: StageLink, failed: Failed) -> None:
        """The stage tells of an error that is no answer to an Open."""
        ...

    def hear_leaving(self, link: StageLink, leaving: Leaving) -> None:
        """The stage is about to stop."""
        ...

    def hear_end(self, link: StageLink, error: BloomBeeError) -> None:
        """The link is gone; said once."""
        ...


@asynccontextmanager
async def deadline(seconds: float, what: str):
    """Turn a wait of more than `seconds` into DeadlineExceeded, which says for `what`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took longer than {seconds:.3g} s") from None


class StageLink:
    """The stream to one stage.

    `error` says why it is gone, None while it stands. `heard_s` is when anything last
    came, `sent_step` the newest step that the stage says to have sent on.
    """

    def __init__(self, stage: Stage, endpoint: Endpoint, connection: Connection) -> None:
        self.stage = stage
        self.endpoint = endpoint
        self.connection = connection
        self.error: BloomBeeError | None = None
        self.silent = False
        self.secret = b""
        self.epoch = -1
        self.heard_s = asyncio.get_running_loop().time()
        self.sent_step = 0
        self._hearer: Hearer | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._asked: asyncio.Future[Opened] | None = None
        self._pulse = Pulse(0.0, self.heard_s)
        self._measured: MeasuredLink | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def __str__(self) -> str:
        return f"blocks {self.stage.span} at {self.stage.peer[-8:]}"

    @property
    def hop(self) -> Hop:
        """How the stage before finds this one."""
        to = self.endpoint
        return Hop(to.peer, to.address, to.certificate_hash)

    @property
    def is_up(self) -> bool:
        """Whether anything can be asked of it."""
        return self.error is None

    @property
    def way_s(self) -> float:
        """How long what we have sent and the stage has not confirmed may take."""
        return self._pulse.way_s(self.connection.counters.bytes_sent)

    def told(self, failed: Failed) -> BloomBeeError:
        """The error that the stage reports, saying which stage it is."""
        return from_code(failed.code, f"{self}: {failed.message}")

    def start(
        self, hearer: Hearer, tasks: asyncio.TaskGroup, session: bytes, estimator: LinkEstimator
    ) -> None:
        """Listen from now on, in `tasks`; what is sent in `session` measures the link."""
        self._hearer, self._tasks = hearer, tasks
        self._measured = MeasuredLink(self.connection, session, estimator, self._pulse)
        self._reader = tasks.create_task(self._listen(hearer))

    async def open(self, message: Open, deadline_s: float) -> Opened:
        """Reserve the session on this stage, or move it to the epoch of `message`.

        Raises what the stage answers, TransportError when the link is gone or ends,
        or DeadlineExceeded: the link counts as gone then, for its next answer could be any.
        """
        try:
            return await self._ask(message, deadline_s)
        except DeadlineExceeded as late:
            self.silent = True
            self.lose(late)
            raise

    async def _ask(self, message: Open, deadline_s: float) -> Opened:
        async with deadline(deadline_s, f"opening a session on {self}"):
            if self._asked is not None and not self._asked.done():
                await asyncio.wait((self._asked,))  # of an attempt that was given up
            self._check_up()
            self.epoch, self.secret = message.epoch, message.secret
            self._asked = asyncio.get_running_loop().create_future()
            await self.connection.send(message)
            return await asyncio.shield(self._asked)

    def _check_up(self) -> None:
        if self.error is not None:
            raise self.error

    async def send(self, message: AnyMessage, content: Buffer) -> None:
        """As `Connection.send`."""
        await (self._measured or self.connection).send(message, content)

    async def beat(self, deadline_s: float) -> None:
        """Ask for a sign of life. Never raises: a broken stream shows when it is read."""
        if not self.is_up or self.connection.state in (State.CLOSING, State.OVER):
            return
        if self._measured is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._measured.beat()
        except TimeoutError:
            _log.debug("%s is slow to take a sign of life", self)
        except BloomBeeError as error:
            self.lose(type(error)(f"{self}: {error}"))

    async def stand_by(self, session: bytes, hop: Hop, deadline_s: float) -> None:
        """Tell the stage who may come after it soon. Never raises."""
        if not self.is_up or self.connection.state is not State.SESSION:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self.connection.send(Standby(session, hop))
        except TimeoutError:
            _log.debug("%s is slow to take word of a spare", self)
        except BloomBeeError as error:
            self.lose(type(error)(f"{self}: {error}"))

    async def _listen(self, hearer: Hearer) -> None:
        """Hand on everything that arrives, until the stream ends."""
        now, ended = asyncio.get_running_loop().time, f"the connection to {self} ended"
        error: BloomBeeError = TransportError(ended)
        try:
            while (received := await self.connection.receive()) is not None:
                self.heard_s = now()
                message, content = received
                match message:
                    case Output():
                        hearer.hear_output(self, message, content)
                    case Beat():
                        self._beaten(message)
                    case Opened():
                        self._answered(message)
                    case Failed():
                        self._failed(hearer, message)
                    case Leaving():
                        hearer.hear_leaving(self, message)
                    case Acknowledged():
                        _log.debug("%s had step %d before", self, message.step)
                    case Closed():
                        self._closed.set()
                    case _:
                        raise ProtocolError(f"sent {type(message).__name__} unasked")
        except BloomBeeError as caught:
            error = type(caught)(f"{self}: {caught}")
        finally:
            self.lose(error)

    def _beaten(self, beat: Beat) -> None:
        if asks(beat):
            if self._tasks is not None:
                self._tasks.create_task(self._answer(answer(beat)))
            return
        self.sent_step = beat.sent_step
        self._pulse.heard(self.heard_s, beat.number)
        if self._measured is not None:
            self._measured.heard(beat)

    async def _answer(self, beat: Beat) -> None:
        """Tell the stage when we heard it, which measures its way to us. Never raises."""
        if not self.is_up or self.connection.state is not State.SESSION:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self.connection.send(beat)
        except (TimeoutError, BloomBeeError) as error:
            _log.debug("%s is not told of the way to us: %s", self, error)

    def _answered(self, opened: Opened) -> None:
        if self._asked is not None and not self._asked.done() and opened.epoch == self.epoch:
            self._asked.set_result(opened)

    def _failed(self, hearer: Hearer, failed: Failed) -> None:
        asked = self._asked
        refused = failed.step == 0 and failed.epoch == self.epoch
        if asked is not None and not asked.done() and refused:
            asked.set_exception(self.told(failed))
            asked.exception()  # it counts as seen: whoever asked may have gone
            return
        hearer.hear_failed(self, failed)

    def lose(self, error: BloomBeeError) -> None:
        """Count the link as gone, and wake whoever waits on it."""
        if self.error is not None:
            return
        self.error = error
        if self._measured is not None:
            self._measured.forget()
        self._closed.set()
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)
            self._asked.exception()
        if self._hearer is not None:
            self._hearer.hear_end(self, error)

    async def close(self, session: bytes, deadline_s: float) -> None:
        """Free the session on the stage if it can be reached, and end the stream. Never raises."""
        try:
            async with asyncio.timeout(deadline_s):
                if self.is_up and self.connection.state in _CLOSABLE:
                    await self.connection.send(Close(session))
                    await self._closed.wait()
        except (BloomBeeError, TimeoutError) as error:
            _log.debug("closing the session on %s: %s", self, error)
        finally:
            self._hearer = None
            if self._reader is not None:
                self._reader.cancel()
            await self.connection.close()


_ANSWER_S = 5.0
_CLOSABLE = (State.OPENING, State.SESSION, State.REOPENING)


async def reach(stage: Stage, endpoints: tuple[Endpoint, ...], connect: Connect) -> StageLink:
    """A stream to `stage` at the first of its endpoints, best first, that answers.

    Raises the error of the last one tried.
    """
    failure: BloomBeeError = TransportError(f"{stage.peer} announces no address")
    for endpoint in endpoints:
        try:
            return StageLink(stage, endpoint, await connect(endpoint))
        except BloomBeeError as error:
            failure = error
    named = f"can't reach blocks {stage.span} at {stage.peer[-8:]}: {failure}"
    raise type(failure)(named)
