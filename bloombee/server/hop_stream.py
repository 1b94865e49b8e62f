"""The stream of the stage before us: it attaches to a session and pushes steps into it."""

from __future__ import annotations

import logging

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, ProtocolError, TransportError
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import Attach, Attached, Failed, Step
from bloombee.server.sessions import Session, Sessions
from bloombee.server.steps import Steps
from bloombee.swarm.connection import Connection

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S = 10.0
"""How long an Attach waits for the client's Open, which travels another way."""


class HopStreams:
    """Serves the streams of upstream stages."""

    def __init__(self, sessions: Sessions, steps: Steps) -> None:
        self._sessions = sessions
        self._steps = steps

    async def serve(self, upstream: Connection, request: Attach) -> None:
        """Take steps from `upstream` until it or the session ends.

        Its end does not end the session: that is for the session's client to decide.
        A refused Attach is answered. Raises TransportError when that fails.
        """
        wanted = SessionId(request.session)
        try:
            session = await self._sessions.standing(wanted, OPEN_DEADLINE_S)
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

    async def _read(self, session: Session, upstream: Connection) -> None:
        try:
            while (received := await upstream.receive()) is not None:
                message, payload = received
                if isinstance(message, Step):
                    await self._steps.take(session, message, payload, upstream.remote)
                elif isinstance(message, Failed):
                    logger.debug("the stage before us: %s", message.message)
        except ProtocolError as error:
            await self._steps.fail(session, error)
            await upstream.send(to_message(error, session=session.id, epoch=session.epoch))
