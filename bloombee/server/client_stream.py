"""A client's stream to this stage: it opens a session, and takes it from epoch to epoch.

The session outlives the stream: when that ends without a Close, the client has a
moment to come back on another. While a session is being opened the stream is read
on, so that signs of life are answered and a client that leaves is noticed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, ProtocolError, RequestError, TransportError
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import (
    AnyMessage,
    Beat,
    Close,
    Closed,
    Failed,
    Open,
    Replay,
    Standby,
    Step,
)
from bloombee.server.openings import Openings
from bloombee.server.sending import Sending
from bloombee.server.sessions import Refused, Session
from bloombee.server.steps import Steps
from bloombee.server.throttle import Throttle
from bloombee.swarm.connection import Connection
from bloombee.swarm.measured import MeasuredLink, answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParts:
    """What serving clients takes."""

    openings: Openings
    steps: Steps
    sending: Sending
    throttle: Throttle


class ClientStreams:
    """Serves clients' streams."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts

    async def serve(self, client: Connection, opening: Open) -> None:
        """Serve the session that `opening` asks for until the stream or the session ends.

        Returns early when an Open is refused and no session is left: the client may
        ask again. Raises TransportError when the client can't be answered.
        """
        await _ClientStream(self._parts, client).run(opening)


class _ClientStream:
    """One stream, and the session that it serves now."""

    def __init__(self, parts: ClientParts, client: Connection) -> None:
        self._parts = parts
        self._client = client
        self._session: Session | None = None
        self._opening: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[bool] | None = None
        self._number = 0

    async def run(self, opening: Open) -> None:
        """Read until the client leaves, closes, or has no session any more."""
        closed = False
        try:
            async with asyncio.TaskGroup() as group:
                await self._open(group, opening)
                if self._session is None:
                    return
                self._reading = group.create_task(self._read(group))
                await asyncio.wait([self._reading])
                closed = not self._reading.cancelled() and self._reading.result()
                if self._opening is not None:
                    self._opening.cancel()
        finally:
            if not closed:
                self._leave()
        if closed:
            if self._session is not None and self._session.client is self._client:
                await self._parts.openings.end(self._session)
            await self._client.send(Closed(SessionId(opening.session)))

    async def _read(self, group: asyncio.TaskGroup) -> bool:
        """Take what the client sends; True when it closed the session, False when it left."""
        clock = asyncio.get_running_loop().time
        try:
            while (received := await self._client.receive()) is not None:
                session = self._session
                if session is None or session.client is not self._client:
                    return False
                session.lease.heard_s = clock()
                message, payload = received
                if isinstance(message, Step):
                    self._take(session, message, payload)
                elif isinstance(message, Close):
                    return True
                else:
                    await self._hear(group, session, message)
                if not session.window.may_read:
                    await self._hold(session)
        except TransportError as error:
            logger.debug("client %s left: %s", self._client.remote, error)
        except ProtocolError as error:
            await self._complain(error)
        return False

    async def _hear(self, group: asyncio.TaskGroup, session: Session, message: AnyMessage) -> None:
        """Whatever is neither a step nor the end."""
        if delay_s := self._parts.throttle.delay_s(session.owner, session.lease.heard_s):
            await asyncio.sleep(delay_s)
        match message:
            case Beat():
                await self._answer(session, message)
            case Replay():
                self._parts.steps.replay(session, message)
            case Open():
                await self._open(group, message)
            case Standby():
                self._parts.openings.prepare(message.hop)
            case Failed():
                logger.debug("client %s: %s", session.owner, message.message)
            case _:
                pass

    async def _answer(self, session: Session, beat: Beat) -> None:
        """Answer a beat, or take the client's answer to ours; and ask the client in turn."""
        if not beat.heard_us:
            self._number = beat.number
            session.client_is_timed = beat.sent_us > 0
            await self._client.send(answer(beat, session.sent_step))
        if not session.rows_told:
            return
        link = MeasuredLink(self._client, session.id, self._parts.sending.estimator(session))
        if beat.heard_us:
            link.heard(beat)
        else:
            await link.beat()

    async def _beat(self, session: Session) -> None:
        await self._client.send(Beat(session.id, self._number, session.sent_step))

    async def _hold(self, session: Session) -> None:
        """Read no more until there is room, and say meanwhile that we live."""

        async def beat() -> None:
            session.lease.heard_s = asyncio.get_running_loop().time()
            await self._beat(session)

        await session.window.hold(lambda: session.client is self._client, beat)

    def _take(self, session: Session, step: Step, payload: memoryview) -> None:
        if session.upstream is not None:
            error = ProtocolError("this stage gets its steps from the stage before it")
            session.window.arrived()
            session.outbox.put_nowait(Refused(step, error))
            return
        session.fed_by_client = True
        self._parts.steps.offer(session, step, payload, session.owner)

    async def _open(self, group: asyncio.TaskGroup, opening: Open) -> None:
        """Have a session opened, or moved to a later epoch; a refusal is answered."""
        held = self._session
        try:
            if held is not None and held.id != opening.session:
                raise RequestError("this stream has a session already: open another stream")
            session = self._parts.openings.admit(self._client, opening)
        except BloomBeeError as error:
            await self._refuse(opening, error)
            return
        self._session = session
        self._opening = group.create_task(self._stand(session, opening))

    async def _stand(self, session: Session, opening: Open) -> None:
        try:
            await self._parts.openings.stand(session, opening, self._client)
        except TransportError as error:
            logger.debug("client %s left: %s", self._client.remote, error)
        except BloomBeeError as error:
            await self._parts.openings.end(session)
            self._session = None
            await self._refuse(opening, error)
            if self._reading is not None:
                self._reading.cancel()

    async def _refuse(self, opening: Open, error: BloomBeeError) -> None:
        logger.info("refused a session of %s: %s", self._client.remote, error)
        asked = SessionId(opening.session)
        try:
            await self._client.send(to_message(error, session=asked, epoch=opening.epoch))
        except TransportError as gone:
            logger.debug("client %s left: %s", self._client.remote, gone)

    async def _complain(self, error: ProtocolError) -> None:
        """Tell the client what it did wrong; its stream ends then."""
        session = self._session
        if session is not None and session.client is self._client:
            await self._parts.sending.fail(session, error, session.epoch)

    def _leave(self) -> None:
        """The stream has ended: a session that was opened waits for its client a little."""
        session = self._session
        if session is None or session.client is not self._client:
            return
        session.client = None
        if session.holds:
            session.lease.orphaned(asyncio.get_running_loop().time())
        else:
            self._parts.openings.abandon(session)
