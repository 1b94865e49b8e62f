"""Who would take over each stage of a session, known and near before it is needed.

For every seat a spare is chosen as a recovery would choose it. The client keeps its own
way there short, and has the stage before the seat do the same; so after a loss neither
looks the swarm up, nor makes a connection from nothing. Spares hold nothing and know of
no session.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from bloombee.client.circuit import Circuit, Seat
from bloombee.client.surroundings import Holder, Surroundings
from bloombee.client.terms import SessionTerms
from bloombee.core import PeerId
from bloombee.errors import BloomBeeError
from bloombee.protocol.messages import Hop

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks at who the spares are."""


class Spares:
    """Keeps the `spares` of all seats of one circuit up to date."""

    def __init__(self, circuit: Circuit, around: Surroundings, terms: SessionTerms) -> None:
        self._circuit = circuit
        self._around = around
        self._terms = terms

    async def run(self) -> None:
        """Look again and again, until cancelled. Never raises otherwise."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Choose spares, reach them, and tell the stages before them. Never raises."""
        seats = tuple(self._circuit.seats)
        busy = {seat.peer: "is in the session" for seat in seats}
        async with asyncio.TaskGroup() as tasks:
            for before, seat in zip((None, *seats), seats, strict=False):
                tasks.create_task(self._see_to(seat, before, busy))

    async def _see_to(self, seat: Seat, before: Seat | None, busy: dict[PeerId, str]) -> None:
        try:
            seat.spares = await self._near(seat, busy)
        except BloomBeeError as error:
            _log.debug("no spare for blocks %s: %s", seat.span, error)
            seat.spares = ()
        if before is None or before.link is None or not seat.spares:
            return
        to = seat.spares[0].endpoints[0]
        hop = Hop(to.peer, to.address, to.certificate_hash)
        heartbeat_s = self._around.settings.heartbeat_s
        await before.link.stand_by(self._circuit.session, hop, heartbeat_s)

    async def _near(self, seat: Seat, busy: dict[PeerId, str]) -> tuple[Holder, ...]:
        """Spares that can be reached, each with the endpoint that answers first.

        Raises SwarmError when there are none, or what else `Surroundings.spares` raises.
        """
        while True:
            found = await self._around.spares(seat.span, self._terms, busy, seat.spares)
            reached = [await self._reached(holder) for holder in found]
            near = tuple(holder for holder in reached if holder is not None)
            if len(near) == len(found):
                return near
            far = {holder.stage.peer for holder in found} - {each.stage.peer for each in near}
            busy = {**busy, **dict.fromkeys(far, "can't be reached")}

    async def _reached(self, holder: Holder) -> Holder | None:
        for endpoint in holder.endpoints:
            if await self._around.warmer.warm(endpoint):
                others = [each for each in holder.endpoints if each != endpoint]
                return replace(holder, endpoints=(endpoint, *others))
        return None
