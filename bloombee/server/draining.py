"""Draining: each client is told to move its session, and all get the time for it.

A client that opens a later epoch meanwhile, because another stage failed, is told
again. The session ends here when its client closes it, as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError
from bloombee.protocol.messages import Leaving
from bloombee.server.sessions import Session, Sessions

logger = logging.getLogger(__name__)

LOOK_S = 0.05
TELL_S = 0.5
"""For a client to take the word; one that is slower hears it with its next look."""


class Draining:
    """Moves all sessions away from here, as far as their clients go along."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._told: set[tuple[SessionId, int]] = set()

    async def run(self, drain_s: float) -> None:
        """Return when no session is left, or after `drain_s`."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + drain_s
        if len(self._sessions):
            logger.info(
                "handing %d sessions over, for up to %g s; a second signal ends this at once",
                len(self._sessions),
                drain_s,
            )
        while len(self._sessions) and (left_s := deadline_s - clock()) > 0:
            await self._tell_all(left_s)
            await asyncio.sleep(min(LOOK_S, max(0.0, deadline_s - clock())))
        if len(self._sessions):
            logger.warning("%d sessions did not move in %g s", len(self._sessions), drain_s)

    async def _tell_all(self, left_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for session in self._sessions:
                if session.stands and (session.id, session.epoch) not in self._told:
                    group.create_task(self._tell(session, left_s))

    async def _tell(self, session: Session, left_s: float) -> None:
        client, epoch = session.client, session.epoch
        if client is None:
            return
        leaving = Leaving(session.id, epoch, left_s, session.held.replay_s)
        # A client that is gone, or busy with a later epoch, is met again or has left.
        with contextlib.suppress(BloomBeeError, TimeoutError):
            async with asyncio.timeout(TELL_S):
                await client.send(leaving)
            self._told.add((session.id, epoch))
