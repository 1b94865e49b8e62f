"""The way from a session to its next stage, in one epoch; or from the last stage to the first."""

from __future__ import annotations

import asyncio
import math

from bloombee.errors import HopLost
from bloombee.protocol.messages import Hop
from bloombee.swarm.measured import MeasuredLink


class Onward:
    """`link` leads to `hop` while it stands; `lost` says why it does so no more.

    With `ring` it leads from the last stage back to the first.
    """

    def __init__(self, hop: Hop, *, ring: bool = False) -> None:
        self.hop = hop
        self.ring = ring
        self.link: MeasuredLink | None = None
        self.lost: HopLost | None = None
        self.sending_since_s = math.inf
        """Since when a step has been going out; infinite while none is."""
        self._settled = asyncio.Event()

    def __str__(self) -> str:
        which = "first" if self.ring else "next"
        return f"the {which} stage, {self.hop.address or self.hop.peer}"

    def stands(self, link: MeasuredLink) -> None:
        """That stage takes steps from now on."""
        self.link = link
        self._settled.set()

    def lose(self, error: HopLost) -> None:
        """That stage can't be reached in this epoch any more."""
        self.link = None
        self.lost = error
        self._settled.set()

    async def wait(self) -> MeasuredLink:
        """The link, once it stands; raises HopLost."""
        await self._settled.wait()
        if self.link is None:
            raise HopLost(str(self.lost))
        return self.link
