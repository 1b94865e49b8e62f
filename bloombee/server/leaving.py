"""How a server leaves: it drains, takes its record out, ends its sessions, leaves the DHT.

A server that is told to stop while it holds sessions says so first, to the swarm and
to its clients, and stays until they have moved or its time for that is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Self

from bloombee.errors import BloomBeeError, StepFailed
from bloombee.protocol.text import one_line
from bloombee.server.stage import StageServer
from bloombee.swarm.node import SwarmNode
from bloombee.swarm.records import ServerRecord, ServerState

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 4.0
"""For everything that leaving takes; a server without sessions is gone within five seconds."""
ANNOUNCE_S = 2.0
"""For the swarm to take the word that we leave; clients hear it from ourselves as well."""
COMPUTE_GRACE_S = 1.5


class Membership:
    """What has to be left at the end, all at once and in time."""

    def __init__(self, node: SwarmNode, drain_s: float) -> None:
        self.node = node
        self.online: ServerRecord | None = None
        self._stage: StageServer | None = None
        self._changed = asyncio.Event()
        self._drain_s = drain_s

    @property
    def stage(self) -> StageServer | None:
        """What serves now; None before that, and between two stages."""
        return self._stage

    @stage.setter
    def stage(self, stage: StageServer | None) -> None:
        self._stage = stage
        self._changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: object, _trace: object
    ) -> None:
        if kind is asyncio.CancelledError and self.stage is not None and len(self.stage.sessions):
            await self._drain(self.stage)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S), asyncio.TaskGroup() as group:
                group.create_task(self._close_node())
                if self.stage is not None:
                    group.create_task(self.stage.stop(COMPUTE_GRACE_S))
        except TimeoutError:
            logger.warning("stopped before everything had ended")

    async def ended(
        self, beside: Coroutine[Any, Any, BloomBeeError] | None = None
    ) -> BloomBeeError:
        """Wait until the server can't go on; returns why, in one line.

        That may also be what `beside`, which runs meanwhile, returns.
        """
        async with asyncio.TaskGroup() as group:
            reasons = [group.create_task(self.node.lost()), group.create_task(self._failed())]
            if beside is not None:
                reasons.append(group.create_task(beside))
            await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
            for reason in reasons:
                reason.cancel()
        return next(reason.result() for reason in reasons if not reason.cancelled())

    async def _failed(self) -> BloomBeeError:
        """Wait for a bug in the stage, whichever it is by then."""
        while True:
            self._changed.clear()
            async with asyncio.TaskGroup() as group:
                changed = group.create_task(self._changed.wait())
                waited: set[asyncio.Task[Any]] = {changed}
                if self._stage is not None:
                    waited.add(group.create_task(self._stage.failed()))
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in waited:
                    task.cancel()
            waited.discard(changed)
            for failed in waited:
                if not failed.cancelled():
                    return _stopped(failed.result())

    async def _drain(self, stage: StageServer) -> None:
        """Tell swarm and clients that we leave, and let the sessions go."""
        async with asyncio.TaskGroup() as group:
            if self.online is not None:
                group.create_task(self._announce_leaving(self.online))
            group.create_task(stage.drain(self._drain_s))

    async def _announce_leaving(self, online: ServerRecord) -> None:
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await self.node.publish(replace(online, state=ServerState.LEAVING))
        except (BloomBeeError, TimeoutError) as error:
            logger.warning("the swarm has not heard that we leave: %s", error or "no answer")

    async def _close_node(self) -> None:
        """Withdraw the record, then leave."""
        try:
            await self.node.close()
        except BloomBeeError as error:
            logger.warning("while leaving the swarm: %s", error)


def _stopped(bug: Exception) -> StepFailed:
    return StepFailed(
        f"stopped after a bug: {type(bug).__name__}: {one_line(str(bug))}; the log above says "
        "where; start the server again"
    )
