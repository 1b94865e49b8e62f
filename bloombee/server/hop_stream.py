"""The stream of the stage before us: it attaches to a session and pushes steps into it.

To the first stage comes the last one in the same way, with the next steps of a loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, ProtocolError, TransportError
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import Attach, Attached, Beat, Failed, Step
from bloombee.server.sending import Sending
from bloombee.server.sessions import Session, Sessions
from bloombee.server.steps import Steps
from bloombee.swarm.connection import Connection
from bloombee.swarm.measured import answer

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_DEADLINE_S = 60.0
"""How long an Attach waits for the client's Open, which travels another way and may queue."""
SILENCE_S = 30.0
"""Without a word for so long the stage before us is gone. A full frame, behind which its
signs of life wait, takes as long at 20 Mbit/s."""


class HopStreams:
    """Serves the streams of upstream stages."""

    def __init__(self, sessions: Sessions, steps: Steps, sending: Sending) -> None:
        self._sessions = sessions
        self._steps = steps
        self._sending = sending

    async def serve(self, upstream: Connection, request: Attach) -> None:
        """Take steps from `upstream` until it, the session or its epoch ends.

        Its end does not end the session: that is for the session's client to decide.
        A refused Attach is answered. Raises TransportError when that fails.
        """
        wanted = SessionId(request.session)
        try:
            session = await self._standing(upstream, request)
            if session is None:
                return
            session.attach(request, upstream)
        except BloomBeeError as error:
            logger.info("refused %s as the stage before us: %s", upstream.remote, error)
            await upstream.send(to_message(error, session=wanted, epoch=request.epoch))
            return
        try:
            await upstream.send(Attached(session.id, session.epoch))
            await self._read(session, upstream)
        except TransportError as error:
            logger.debug("the stage before us left: %s", error)
        finally:
            session.detach(upstream)

    async def _standing(self, upstream: Connection, request: Attach) -> Session | None:
        """The session, once it stands in the epoch of `request`; None when `upstream` left.

        Raises RequestError when it doesn't in time.
        """
        waiting = self._sessions.standing(
            SessionId(request.session), request.epoch, OPEN_DEADLINE_S
        )
        async with asyncio.TaskGroup() as group:
            standing = group.create_task(_outcome(waiting))
            leaving = group.create_task(_outcome(upstream.receive()))
            await asyncio.wait([standing, leaving], return_when=asyncio.FIRST_COMPLETED)
            stands = standing.done()
            for task in (standing, leaving):
                task.cancel()
        if not stands:
            return None
        outcome = standing.result()
        if isinstance(outcome, BloomBeeError):
            raise outcome
        return outcome

    async def _read(self, session: Session, upstream: Connection) -> None:
        try:
            while (received := await upstream.receive(SILENCE_S)) is not None:
                if not session.is_fed_by(upstream):
                    return
                message, payload = received
                if isinstance(message, Step):
                    looped = session.looped is upstream
                    self._steps.offer(session, message, payload, upstream.remote, looped=looped)
                    if not session.window.may_read:
                        await self._hold(session, upstream)
                elif isinstance(message, Beat):
                    await upstream.send(answer(message, session.sent_step))
                elif isinstance(message, Failed):
                    logger.debug("the stage before us: %s", message.message)
        except ProtocolError as error:
            if session.is_fed_by(upstream):
                await self._sending.fail(session, error, session.epoch)
            await upstream.send(to_message(error, session=session.id, epoch=session.epoch))

    async def _hold(self, session: Session, upstream: Connection) -> None:
        """Read no more until there is room, and say meanwhile that we live."""

        async def beat() -> None:
            await upstream.send(Beat(session.id, 0, session.sent_step))

        await session.window.hold(lambda: session.is_fed_by(upstream), beat)


async def _outcome(work: Awaitable[T]) -> T | BloomBeeError:
    """What `work` returns, or the error of our tree that it raises."""
    try:
        return await work
    except BloomBeeError as error:
        return error
