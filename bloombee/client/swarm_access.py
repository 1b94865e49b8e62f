"""From "a session of this size" to an open session: look, choose a route, open, try another.

Servers die and fill up between two looks at the swarm. A peer that does not
answer, is stopping, or is full is left out and another route is tried, a few
times; what the request itself is wrong about is raised at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from bloombee.client.links import Connect, StageFailure
from bloombee.client.routing import Demand, choose_route
from bloombee.client.session import RemoteSession, SessionTerms
from bloombee.config.client import ClientSettings
from bloombee.core import PeerId, Route
from bloombee.errors import BloomBeeError, DeadlineExceeded, SwarmError
from bloombee.swarm.records import ServerRecord
from bloombee.swarm.view import SwarmSnapshot
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)


@dataclass
class SwarmAccess:
    """How one client reaches the servers of one model.

    `look` gives the current records, `connect` opens a connection, `close` lets go
    of everything. `tie_break` gives numbers in [0, 1) that spread clients over equal
    servers. One look serves new sessions for `settings.snapshot_s`, unless one fails.
    """

    look: Callable[[], Awaitable[SwarmSnapshot]]
    connect: Connect
    settings: ClientSettings
    num_blocks: int
    close: Callable[[], Coroutine[Any, Any, None]]
    tie_break: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    _seen: tuple[float, SwarmSnapshot] | None = field(default=None, init=False)

    async def open(self, terms: SessionTerms, tasks: asyncio.TaskGroup) -> RemoteSession:
        """An open session on the best route there is.

        Raises SwarmError when no route covers the model, RequestError when the
        session is too large for its servers, or what the last route tried failed of.
        """
        excluded: set[PeerId] = set()
        failure: BloomBeeError | None = None
        for _ in range(self.settings.route_attempts):
            snapshot = await self._snapshot(fresh=failure is not None)
            try:
                route = self._choose(snapshot, terms, frozenset(excluded))
            except SwarmError as error:
                self._seen = None
                raise (failure or error) from error
            try:
                return await RemoteSession.open(
                    route,
                    [_endpoints(snapshot, stage.peer) for stage in route.stages],
                    terms,
                    connect=self.connect,
                    settings=self.settings,
                    tasks=tasks,
                )
            except StageFailure as stage:
                if not stage.error.retry:
                    raise stage.error from None
                _log.info("trying another route: %s", stage.error)
                excluded.add(stage.peer)
                failure = stage.error
        raise failure or SwarmError("no route was tried: set route_attempts to 1 or more")

    async def _snapshot(self, *, fresh: bool) -> SwarmSnapshot:
        now = asyncio.get_running_loop().time()
        if self._seen is not None and not fresh and now - self._seen[0] < self.settings.snapshot_s:
            return self._seen[1]
        try:
            async with asyncio.timeout(self.settings.connect_s):
                snapshot = await self.look()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the DHT did not answer within {self.settings.connect_s:g} s; "
                "check that an initial peer still runs"
            ) from None
        self._seen = (now, snapshot)
        return snapshot

    def _choose(
        self, snapshot: SwarmSnapshot, terms: SessionTerms, excluded: frozenset[PeerId]
    ) -> Route:
        demand = Demand(
            self.num_blocks, terms.fingerprint, terms.dtype, terms.sequences, terms.max_length
        )
        # When nobody serves this model, the error tells what is served instead.
        records = snapshot.select(fingerprint=terms.fingerprint).records or snapshot.records
        return choose_route(records, demand, tie_break=self.tie_break, exclude=excluded)


def _endpoints(snapshot: SwarmSnapshot, peer: PeerId) -> list[Endpoint]:
    record: ServerRecord | None = snapshot.find(peer)
    if record is None:
        return []
    # One without an address is reached through libp2p.
    addresses = record.addresses or ("",)
    return [Endpoint(record.peer, address, record.certificate_hash) for address in addresses]
