"""From "a session of this size" to an open session: look, choose a route, open, try another.

Servers die and fill up between two looks at the swarm. A peer that does not
answer, is stopping, or is full is left out and another route is tried, for as long as
opening may take; what the request itself is wrong about is raised at once. When all
that hold some blocks are full, the session queues for their KV.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bloombee.client.descriptions import Descriptions
from bloombee.client.links import Connect
from bloombee.client.opening import StageFailure
from bloombee.client.replay import EmbedEntries
from bloombee.client.routing import Demand, choose_route
from bloombee.client.session import RemoteSession
from bloombee.client.surroundings import Holder
from bloombee.client.survey import Survey, endpoints_of
from bloombee.client.terms import SessionTerms
from bloombee.config.client import ClientSettings
from bloombee.core import PeerId, Span, doubled
from bloombee.errors import (
    BloomBeeError,
    DeadlineExceeded,
    KVFull,
    ProtocolError,
    RequestError,
    SwarmError,
    VersionMismatch,
)
from bloombee.planner.neighbours import Neighbours
from bloombee.planner.recovery import PeerHealth
from bloombee.planner.routing import token_s
from bloombee.planner.workload import Objective
from bloombee.swarm.view import SERVING, SwarmSnapshot
from bloombee.swarm.warming import Warmer
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)

STALE_S = 30.0
"""How old a look may be whose servers take over lost blocks at once."""
YOUNG_S = 20.0
"""How old a look gets while sessions run: with the time between looks, not yet stale."""
BATCH_ROWS = 4
"""A session of so many sequences is a batch: others like it share its route."""
PROMPT_ATTEMPTS = 2
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
"""Between attempts to open a session."""


@dataclass(slots=True)
class _Search:
    """The search for one open session: until when, who was full, what failed last.

    `queue_s` is how long the route that was found last may queue for KV, None: not yet.
    """

    until_s: float
    queue_until_s: float
    full: set[PeerId] = field(default_factory=set[PeerId])
    failure: BloomBeeError | None = None
    failures: int = 0
    queue_s: float | None = None

    def pause_s(self) -> float:
        """Before the next attempt; none at first, then longer and longer."""
        if self.failures < PROMPT_ATTEMPTS:
            return 0.0
        return doubled(FIRST_PAUSE_S, self.failures - PROMPT_ATTEMPTS, LONGEST_PAUSE_S)


@dataclass
class SwarmAccess:
    """How one client reaches the servers of one model.

    `look` gives the current records, `connect` opens a connection, `close` lets go
    of everything. `tie_break` gives numbers in [0, 1) that spread clients over equal
    servers. One look serves new sessions for `settings.snapshot_s`, unless one fails.
    `health` is what all sessions of the client know of peers that failed.
    """

    look: Callable[[], Awaitable[SwarmSnapshot]]
    connect: Connect
    settings: ClientSettings
    num_blocks: int
    close: Callable[[], Coroutine[Any, Any, None]]
    tie_break: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    health: PeerHealth = field(init=False)
    neighbours: Neighbours = field(init=False)
    descriptions: Descriptions = field(init=False)
    warmer: Warmer = field(init=False)
    survey: Survey = field(init=False)
    _seen: tuple[float, SwarmSnapshot] | None = field(default=None, init=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.health = PeerHealth(
            backoff_s=self.settings.backoff_s, cap_s=self.settings.backoff_cap_s
        )
        self.warmer = Warmer(self.connect)
        self.neighbours = Neighbours(self.settings.codec)
        self.survey = Survey(self.connect, self.settings, self.neighbours)
        self.descriptions = Descriptions(self.connect)

    async def open(
        self, terms: SessionTerms, tasks: asyncio.TaskGroup, embed: EmbedEntries
    ) -> RemoteSession:
        """An open session on the best route there is; `embed` is for rebuilding its first stage.

        Raises SwarmError when no route covers the model, RequestError when the
        session is too large for its servers, KVFull when they have no room in
        `settings.queue_s`, or what the last route tried failed of.
        """
        now_s = asyncio.get_running_loop().time()
        search = _Search(now_s + self.settings.open_s, now_s + self.settings.queue_s)
        await self._survey(terms, tasks)
        while True:
            holders = await self._find(search, terms)
            session = RemoteSession(holders, terms, self, tasks, embed)
            try:
                await session.open(search.queue_s or 0.0)
            except StageFailure as stage:
                self._learn(search, stage)
            else:
                self._follow(session)
                return session
            await asyncio.sleep(search.pause_s())

    async def likely_route(self, terms: SessionTerms) -> list[Holder]:
        """The stages that a session of these terms would have now. Raises as `open`."""
        return await self._route(terms, set(), fresh=False)

    async def _find(self, search: _Search, terms: SessionTerms) -> list[Holder]:
        """The best route as of now; waits for one where those that there were have failed."""
        now = asyncio.get_running_loop().time
        while True:
            search.queue_s = None
            try:
                return await self._route(terms, search.full, fresh=search.failure is not None)
            except SwarmError as error:
                if search.full:
                    search.queue_s = max(search.queue_until_s - now(), 0.0)
                    return await self._route(terms, set(), fresh=False)
                if search.failure is None or now() >= search.until_s:
                    self._seen = None
                    raise (search.failure or error) from error
            search.failures += 1
            await asyncio.sleep(search.pause_s())

    def _learn(self, search: _Search, stage: StageFailure) -> None:
        """Note why a route could not be opened; raises what no other route would mend."""
        now_s, error = asyncio.get_running_loop().time(), stage.error
        search.failure = error
        if isinstance(error, KVFull):
            if search.queue_s is not None:
                raise error from None
            search.full.add(stage.peer)
        elif not _may_pass(error) or (search.failures and now_s >= search.until_s):
            raise error from None  # the first may have queued for long: it is not the last
        else:
            search.failures += 1
            self.health.failed(stage.peer, now_s)
        _log.info("trying another route: %s", error)

    async def _route(
        self, terms: SessionTerms, exclude: set[PeerId], *, fresh: bool
    ) -> list[Holder]:
        """Stages for all blocks; peers that failed of late only where there are no others."""
        snapshot = await self._snapshot(0.0 if fresh else self.settings.snapshot_s)
        away = self.health.left_out(asyncio.get_running_loop().time())
        if away:
            try:
                return self._choose(snapshot, terms, frozenset(exclude | away))
            except (SwarmError, RequestError):
                _log.debug("no route without peers that failed of late")
        return self._choose(snapshot, terms, frozenset(exclude))

    async def holders(
        self, span: Span, terms: SessionTerms, *, busy: Mapping[PeerId, str], fresh: bool
    ) -> list[Holder]:
        """Stages that cover `span`, of peers that are neither `busy` nor left out for now.

        `busy` says why they are. With `fresh` the swarm is looked at again. Raises
        SwarmError when blocks have no holder, RequestError when the session is too large
        for those there are.
        """
        away = self.health.left_out(asyncio.get_running_loop().time())
        if not fresh and self._seen is not None:
            snapshot = await self._snapshot(max(STALE_S, self.settings.snapshot_s))
            try:
                return self._choose(snapshot, terms, away, span, busy)
            except (SwarmError, RequestError) as error:
                _log.debug("looking again: %s", error)
        return self._choose(await self._snapshot(0.0), terms, away, span, busy)

    def has_holders(self, span: Span, terms: SessionTerms, busy: Mapping[PeerId, str]) -> bool:
        """Whether `holders` would find any as of the last look, with those left out for now."""
        if self._seen is None:
            return False
        try:
            self._choose(self._seen[1], terms, frozenset(), span, busy)
        except (SwarmError, RequestError):
            return False
        return True

    async def spares(
        self, span: Span, terms: SessionTerms, busy: Mapping[PeerId, str], kept: Sequence[Holder]
    ) -> Sequence[Holder]:
        """As `holders`, for when they are needed; `kept`, if any, where they still are `fit`.

        Of a look that is young enough to still count when a stage is lost.
        """
        snapshot = await self._snapshot(max(YOUNG_S, self.settings.snapshot_s))
        if kept and self.fit(kept, busy):
            return kept
        away = self.health.left_out(asyncio.get_running_loop().time())
        return self._choose(snapshot, terms, away, span, busy)

    def fit(self, holders: Sequence[Holder], busy: Mapping[PeerId, str]) -> bool:
        """Whether `holders`, chosen before, could still be had as of the last look."""
        barred = self.health.left_out(asyncio.get_running_loop().time()).union(busy)
        return all(
            each.stage.peer not in barred
            and self.endpoints(each.stage.peer)
            and self.serves(each.stage.peer, each.stage.span)
            for each in holders
        )

    def endpoints(self, peer: PeerId) -> tuple[Endpoint, ...]:
        """Where `peer` listens, as of the last look; empty when it was not seen."""
        return () if self._seen is None else _endpoints(self._seen[1], peer)

    def serves(self, peer: PeerId, span: Span) -> bool:
        """Whether `peer` may hold `span`: unless it was seen with other blocks."""
        record = None if self._seen is None else self._seen[1].find(peer)
        return record is None or record.span.covers(span)

    async def _snapshot(self, max_age_s: float) -> SwarmSnapshot:
        now = asyncio.get_running_loop().time
        asked_s = now()
        try:
            async with asyncio.timeout(self.settings.connect_s), self._looking:
                # Also when another look has begun since: one serves all who wait.
                if self._seen is not None and asked_s - self._seen[0] < max_age_s:
                    return self._seen[1]
                looked_s = now()
                snapshot = await self.look()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the DHT did not answer within {self.settings.connect_s:g} s; "
                "check that an initial peer still runs"
            ) from None
        if self._seen is not None:
            for peer in _renewed(self._seen[1], snapshot):
                self.health.worked(peer)
        self._seen = (looked_s, snapshot)
        return snapshot

    def _choose(
        self,
        snapshot: SwarmSnapshot,
        terms: SessionTerms,
        exclude: frozenset[PeerId],
        part: Span | None = None,
        busy: Mapping[PeerId, str] | None = None,
    ) -> list[Holder]:
        demand = self._demand(terms, part)
        # When nobody serves this model, the error tells what is served instead.
        records = snapshot.select(fingerprint=terms.fingerprint).records or snapshot.records
        route = choose_route(
            records,
            demand,
            tie_break=self.tie_break,
            exclude=exclude,
            busy=busy,
            known=self.survey.known(),
        )
        return [Holder(stage, _endpoints(snapshot, stage.peer)) for stage in route.stages]

    def _demand(self, terms: SessionTerms, part: Span | None) -> Demand:
        objective = self.settings.objective
        if objective == "auto":
            many = terms.background or terms.sequences >= BATCH_ROWS
            objective = "throughput" if many else "latency"
        return Demand(
            self.num_blocks,
            terms.fingerprint,
            terms.dtype,
            terms.sequences,
            terms.max_length,
            part,
            prompt_tokens=max(map(len, terms.prompts), default=0),
            row_bytes=terms.row_bytes,
            objective=Objective(objective),
            server_head=terms.server_head,
        )

    async def _survey(self, terms: SessionTerms, tasks: asyncio.TaskGroup) -> None:
        """Let servers say what a route over them would cost, if there is a choice."""
        if not self.settings.survey_s:
            return
        snapshot = await self._snapshot(self.settings.snapshot_s)
        online = snapshot.select(fingerprint=terms.fingerprint, dtype=terms.dtype, states=SERVING)
        await self.survey.look(online.records, tasks)

    def _follow(self, session: RemoteSession) -> None:
        """Count the session's load, and learn from it whether servers are what they say."""
        terms, route = session.terms, session.route
        demand = self._demand(terms, None)
        predicted_s = 0.0
        found = [None if self._seen is None else self._seen[1].find(s.peer) for s in route.stages]
        records = [record for record in found if record is not None]
        if demand.objective is Objective.LATENCY and len(records) == len(route.stages):
            errand = replace(demand.errand, prompt_tokens=0, kv_tokens=0)
            predicted_s = token_s(route, records, errand, self.survey.known())
        self.survey.follow(session, predicted_s, rows=terms.sequences, kv_tokens=demand.kv_tokens)


def _may_pass(error: BloomBeeError) -> bool:
    """Whether another server, or this one later, could do what failed here."""
    garbled = isinstance(error, ProtocolError) and not isinstance(error, VersionMismatch)
    return error.retry or garbled


def _renewed(before: SwarmSnapshot, after: SwarmSnapshot) -> list[PeerId]:
    """Peers that are online now and were something else: they have moved, or begun anew."""
    known = {record.peer: (record.span, record.state) for record in before.records}
    return [
        record.peer
        for record in after.select(states=SERVING).records
        if known.get(record.peer, (record.span, record.state)) != (record.span, record.state)
    ]


def _endpoints(snapshot: SwarmSnapshot, peer: PeerId) -> tuple[Endpoint, ...]:
    record = snapshot.find(peer)
    return () if record is None else endpoints_of(record)
