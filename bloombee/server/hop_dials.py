"""Connections to next stages, each under a deadline from how long it took before.

A client waits while one stage dials the next. One that was reached before and does not
answer in many times the time it took then is lost to us; one that was never reached
gets the full deadline, for its way may lead through relays.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from bloombee.swarm.connection import Connection, ConnectionSettings, Signer, connect
from bloombee.transport.interface import Dialer, Endpoint

PATIENCE = 20.0
"""How many times as long as before a dial may take."""
SHORTEST_S = 1.5
LONGEST_S = 3.0
"""The bounds of that: for servers that are busy, and for clients that wait."""
MOST_ENDPOINTS = 1024


class HopDials:
    """Dials for one server."""

    def __init__(self, dialer: Dialer, identity: Signer, settings: ConnectionSettings) -> None:
        self._dialer = dialer
        self._identity = identity
        self._settings = settings
        self._took_s: dict[Endpoint, float] = {}
        """The longest of each endpoint: a first dial makes a connection, others share it."""

    async def dial(self, endpoint: Endpoint) -> Connection:
        """An authenticated connection; raises what `swarm.connection.connect` raises."""
        now = asyncio.get_running_loop().time
        settings = replace(self._settings, deadline_s=self.deadline_s(endpoint))
        began_s = now()
        connection = await connect(self._dialer, endpoint, self._identity, settings=settings)
        took_s = max(now() - began_s, self._took_s.pop(endpoint, 0.0))
        self._took_s[endpoint] = took_s
        if len(self._took_s) > MOST_ENDPOINTS:
            del self._took_s[next(iter(self._took_s))]
        return connection

    def deadline_s(self, endpoint: Endpoint) -> float:
        """How long the next dial to `endpoint` may take."""
        took_s = self._took_s.get(endpoint)
        if took_s is None:
            return self._settings.deadline_s
        return min(self._settings.deadline_s, LONGEST_S, max(SHORTEST_S, PATIENCE * took_s))
