"""What the servers of a route say of themselves, asked in the background and kept for a while."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from bloombee.client.links import Connect, deadline
from bloombee.client.surroundings import Holder
from bloombee.core import PeerId
from bloombee.errors import BloomBeeError
from bloombee.protocol.messages import Describe, Description

_log = logging.getLogger(__name__)

ASKED = Describe(topics=("links", "costs"))
ANSWER_S = 5.0
PAUSES_S = (0.0, 2.0, 5.0, 10.0)
"""Before each look; the last one goes on."""
KEPT_S = 60.0
MOST_PEERS = 256


class Descriptions:
    """Of the servers that one client uses."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._said: OrderedDict[PeerId, tuple[float, Description]] = OrderedDict()

    def of(self, peer: PeerId) -> Description | None:
        """What it said last, if that is not long ago."""
        at_s, said = self._said.get(peer, (0.0, None))
        if said is None or asyncio.get_running_loop().time() - at_s > KEPT_S:
            return None
        return said

    async def keep(self, holders: Sequence[Holder]) -> None:
        """Ask the servers of a route again and again, until cancelled. Never raises otherwise."""
        pauses = iter(PAUSES_S)
        pause_s = 0.0
        while True:
            pause_s = next(pauses, pause_s)
            await asyncio.sleep(pause_s)
            async with asyncio.TaskGroup() as tasks:
                for holder in holders:
                    tasks.create_task(self._ask(holder))

    async def _ask(self, holder: Holder) -> None:
        peer = holder.stage.peer
        try:
            async with deadline(ANSWER_S, f"asking {peer}"):
                connection = await self._connect(holder.endpoints[0])
                try:
                    await connection.send(ASKED)
                    received = await connection.receive()
                finally:
                    await connection.close()
        except BloomBeeError as error:
            _log.debug("%s tells nothing of itself: %s", peer, error)
            return
        if received is not None and isinstance(received[0], Description):
            self._said[peer] = (asyncio.get_running_loop().time(), received[0])
            self._said.move_to_end(peer)
            if len(self._said) > MOST_PEERS:
                self._said.popitem(last=False)
