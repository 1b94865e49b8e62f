"""Stages that are about to stop: asking for others to take their blocks in good time."""

from __future__ import annotations

import asyncio
import logging

from bloombee.client.circuit import Circuit
from bloombee.client.surroundings import Surroundings
from bloombee.client.terms import SessionTerms
from bloombee.errors import BloomBeeError, PeerStopping
from bloombee.planner.recovery import Trouble

_log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Between two looks for who could take the blocks of a stage that stops."""


class Moving:
    """Has stages that leave replaced, once somebody else holds their blocks.

    Until then they go on: an epoch more would cost a pause and win nothing.
    """

    def __init__(self, circuit: Circuit, around: Surroundings, terms: SessionTerms) -> None:
        self._circuit = circuit
        self._around = around
        self._terms = terms
        self._next_look_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether some stage is about to stop."""
        return any(seat.leaving is not None for seat in self._circuit.seats)

    async def request(self) -> None:
        """Report those stages whose blocks others can take. Never raises."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + PAUSE_S
        seats = self._circuit.seats
        for seat in [seat for seat in seats if seat.leaving is not None]:
            self._around.health.leaves(seat.peer, now_s)
            busy = {other.peer: "is in the session" for other in seats if other is not seat}
            try:
                await self._around.holders(seat.span, self._terms, busy=busy, fresh=True)
            except BloomBeeError as error:
                _log.info("nobody takes blocks %s over yet: %s", seat.span, error)
            else:
                reason = PeerStopping(f"blocks {seat.span} at {seat.peer[-8:]} are leaving")
                self._circuit.note(seat, Trouble.STOPPING, reason)
