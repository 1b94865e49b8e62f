"""One span after another under one identity: a server loads, serves, and moves.

A move keeps every promise made to sessions. The new weights are loaded first, beside
the old ones and while these serve, where both fit. Then the record says that the server
leaves, and clients move their sessions; if some can't (and are not waiting for just the
blocks that it goes to), or if nobody else holds its own any more, it stays. Only then the
old span goes. When the new one can't be served, the server goes back to the old one,
and says so loudly.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from bloombee.core import Span
from bloombee.errors import BloomBeeError, SettingsError, SwarmError
from bloombee.models import SpanModel
from bloombee.planner.moves import Move, opens_gap
from bloombee.server.leaving import COMPUTE_GRACE_S, Membership
from bloombee.server.placement import Noticeboard
from bloombee.server.stage import StageServer
from bloombee.swarm.records import ServerRecord, ServerState

logger = logging.getLogger(__name__)

LOAD_S = 1800.0
"""For the weights of another span to be there; files may have to be downloaded."""
ATTEMPTS = 5
"""To tell the swarm what is served now; each takes as long as `SwarmNode.publish` tries."""
START_S = 10.0
"""For the port to be free again."""
PAUSE_S = 0.25
URGENT_S = 3.0
"""For sessions to move elsewhere while some block has no holder at all."""

_FAILURES = (BloomBeeError, RuntimeError, OSError, MemoryError)
"""What loading and starting may raise: ours, torch's, and the system's."""


class Maker(Protocol):
    """Makes stages; see `assembly.Assembly`."""

    def fits_beside(self, span: Span) -> bool: ...
    async def load(self, span: Span) -> SpanModel: ...
    def stage(self, model: SpanModel) -> StageServer: ...
    def address(self, stage: StageServer) -> str: ...


class Host:
    """Serves as `member`, whose stage and record it sets, with stages from `maker`.

    `record` is what was published last. `report` is told of each span once it is served.
    """

    def __init__(
        self,
        member: Membership,
        board: Noticeboard,
        maker: Maker,
        *,
        drain_s: float,
        report: Callable[[ServerRecord], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._member = member
        self._board = board
        self._maker = maker
        self._drain_s = drain_s
        self._report = report
        self._clock = clock

    @property
    def record(self) -> ServerRecord:
        """What the swarm knows of this server; there is one once it has served."""
        record = self._member.online
        if record is None:
            raise RuntimeError("the server has not served yet")
        return record

    async def serve(self, joining: ServerRecord) -> None:
        """Load the record's span, serve it, and publish that.

        Raises ModelError, SettingsError, SwarmError.
        """
        await self._serve(joining, await self._load(joining.span))

    async def move(self, move: Move) -> bool:
        """Serve other blocks in place of those of now; False when the server stays with these.

        Raises SwarmError when the swarm can't be told, and what stands in the way when
        not even the old blocks can be served any more.
        """
        online, to = self.record, move.to
        logger.info("moving from blocks %s to %s", online.span, to)
        try:
            model = await self._load(to) if self._maker.fits_beside(to) else None
        except _FAILURES as error:
            logger.error("can't load blocks %s, staying with %s: %s", to, online.span, error)
            await self._tell(online)
            return False
        if not await self._leaves(online, move):
            return False
        await self._retire()
        joining = replace(
            online,
            span=to,
            state=ServerState.JOINING,
            throughput_tokens_per_s=0.0,
            moved_at_s=self._clock(),
        )
        try:
            await self._board.publish(joining)
            await self._serve(joining, await self._load(to) if model is None else model)
        except _FAILURES as error:
            logger.error("can't serve blocks %s, back to %s: %s", to, online.span, error)
        else:
            logger.info("moved to blocks %s", to)
            return True
        model = None
        if self._member.stage is not None:
            await self._retire()
        await self._serve(replace(joining, span=online.span), await self._load(online.span))
        return False

    async def _leaves(self, online: ServerRecord, move: Move) -> bool:
        """Have all sessions move elsewhere; if that fails, everything is as before.

        Where a block has no holder sessions have nowhere to go, and wait for that block:
        they are given a moment, and rebuilt elsewhere once they are complete again.
        """
        stage = self._member.stage
        if stage is None:
            return False
        leaving = replace(online, state=ServerState.LEAVING, next_span=move.to)
        await self._board.publish(leaving)
        await stage.drain(min(self._drain_s, URGENT_S) if move.closes else self._drain_s)
        reason = ""
        if len(stage.sessions) and not move.closes:
            reason = f"{len(stage.sessions)} sessions did not move"
        elif await self._is_needed(online, move):
            reason = "nobody else holds its blocks any more"
        if reason:
            logger.warning("staying with blocks %s: %s", online.span, reason)
            stage.reopen()
            await self._tell(replace(online, moved_at_s=self._clock()))
        return not reason

    async def _is_needed(self, online: ServerRecord, move: Move) -> bool:
        try:
            snapshot = await self._board.snapshot(online.fingerprint, online.num_blocks)
        except BloomBeeError as error:
            logger.debug("can't look before leaving: %s", error)
            return True
        records = snapshot.select(dtype=online.dtype).records
        return opens_gap(records, move, online.num_blocks)

    async def _load(self, span: Span) -> SpanModel:
        async with asyncio.timeout(LOAD_S):
            return await self._maker.load(span)

    async def _serve(self, joining: ServerRecord, model: SpanModel) -> None:
        """Start a stage of `model`, measure it, and publish it."""
        stage = await self._started(model)
        tokens_per_s, kv_tokens = await stage.measure()
        online = replace(
            joining,
            addresses=(self._maker.address(stage),),
            state=ServerState.ONLINE,
            throughput_tokens_per_s=tokens_per_s,
            kv_tokens=kv_tokens,
        )
        await self._tell(online)
        # Modules and weights are never garbage: collections skip them from here on, which
        # saves pauses of a tenth of a second, and two seconds when the process ends.
        gc.freeze()
        self._report(online)

    async def _started(self, model: SpanModel) -> StageServer:
        """A stage that listens; after another it waits until that one's port is free."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (START_S if self._member.online is not None else 0.0)
        while True:
            stage = self._member.stage = self._maker.stage(model)
            try:
                await stage.start()
            except SettingsError:
                self._member.stage = None
                await stage.stop(0.0)
                if loop.time() >= until_s:
                    raise
            else:
                return stage
            await asyncio.sleep(PAUSE_S)

    async def _retire(self) -> None:
        """End the stage, and give its memory back."""
        stage, self._member.stage = self._member.stage, None
        if stage is not None:
            await stage.stop(COMPUTE_GRACE_S)
        del stage
        await asyncio.sleep(0)  # who waited for it lets go
        gc.unfreeze()
        gc.collect()

    async def _tell(self, record: ServerRecord) -> None:
        """Publish what is served now; until that is known, clients come in vain."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._board.publish(record)
            except SwarmError as error:
                if attempt == ATTEMPTS:
                    raise
                logger.warning("the swarm does not know yet what is served: %s", error)
                await asyncio.sleep(PAUSE_S)
            else:
                break
        self._member.online = record
