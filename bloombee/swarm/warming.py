"""Ways to peers that may be needed at any moment.

The first stream to a peer costs a certificate, a connection and a handshake; the next
one a single round trip, since transports keep a connection that was used of late. So
a stream is opened and closed now and again. Nothing is asked on it: to the peer it is no
session and no request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.core import doubled
from bloombee.errors import BloomBeeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bloombee.swarm.connection import Connection
    from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)

WARM_S = 20.0
"""How long a way counts as short; transports keep idle connections for longer."""
COLD_S = 300.0
"""A peer that can't be reached is tried again after WARM_S, then twice that, up to this."""
MOST_WAYS = 256
"""So many are remembered, and kept, at most."""


@dataclass(slots=True)
class _Way:
    until_s: float
    failures: int = 0


class Warmer:
    """Keeps ways short over `connect`, which has a deadline of its own."""

    def __init__(self, connect: Callable[[Endpoint], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._ways: dict[Endpoint, _Way] = {}

    async def warm(self, endpoint: Endpoint) -> bool:
        """Whether the way to `endpoint` is short, as of the last WARM_S. Never raises.

        While another call sees to the same way, it is taken to be.
        """
        now = asyncio.get_running_loop().time
        way = self._ways.get(endpoint)
        if way is None:
            way = self._new(endpoint, now())
            if way is None:
                return False
        elif now() < way.until_s:
            return way.failures == 0
        way.until_s = now() + WARM_S
        try:
            connection = await self._connect(endpoint)
        except asyncio.CancelledError:
            way.until_s = now()
            raise
        except BloomBeeError as error:
            _log.debug("no way to %s, who may be needed: %s", endpoint.peer, error)
            way.until_s = now() + doubled(WARM_S, way.failures, COLD_S)
            way.failures += 1
            return False
        way.failures = 0
        await connection.close()
        return True

    def _new(self, endpoint: Endpoint, now_s: float) -> _Way | None:
        """A way to remember; None when all that are remembered are still of use."""
        if len(self._ways) >= MOST_WAYS:
            self._ways = {key: way for key, way in self._ways.items() if way.until_s > now_s}
        if len(self._ways) >= MOST_WAYS:
            return None
        way = self._ways[endpoint] = _Way(now_s)
        return way
