"""The way from a session to its next stage, in one epoch."""

from __future__ import annotations

import asyncio
import math

from bloombee.errors import HopLost
from bloombee.protocol.messages import Hop
from bloombee.swarm.connection import Connection


class Onward:
    """`link` leads to `hop` while it stands; `lost` says why it does so no more."""

    def __init__(self, hop: Hop) -> None:
        self.hop = hop
        self.link: Connection | None = None
        self.lost: HopLost | None = None
        self.sending_since_s = math.inf
        """Since when a step has been going out; infinite while none is."""
        self._settled = asyncio.Event()

    def __str__(self) -> str:
        return f"the next stage, {self.hop.address or self.hop.peer}"

    def stands(self, link: Connection) -> None:
        """The next stage takes steps from now on."""
        self.link = link
        self._settled.set()

    def lose(self, error: HopLost) -> None:
        """The next stage can't be reached in this epoch any more."""
        self.link = None
        self.lost = error
        self._settled.set()

    async def wait(self) -> Connection:
        """The link, once it stands; raises HopLost."""
        await self._settled.wait()
        if self.link is None:
            raise HopLost(str(self.lost))
        return self.link
