"""What a client finds out about the servers of its model, in the background.

Before a session opens, servers that have a rival are asked what they cost, how busy they are
and what they measured of their links; the answers count for a while. Opening waits for them a
moment and goes on without what has not come. The client adds what it measures itself: round
trips, the load that it has put on servers since they answered, and how long tokens really took.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bloombee.client.ledger import Pace
from bloombee.client.links import Connect
from bloombee.client.traffic import Progress
from bloombee.config.client import ClientSettings
from bloombee.core import PeerId, Span
from bloombee.errors import BloomBeeError, ProtocolError, TransportError
from bloombee.planner.hearsay import (
    Ends,
    Knowledge,
    LinkFacts,
    ServerFacts,
    corrected,
    facts_of,
    faded,
    link_of,
)
from bloombee.planner.neighbours import Neighbours
from bloombee.protocol.messages import Describe, Description
from bloombee.swarm.records import ServerRecord
from bloombee.telemetry import loop_us
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)

MOST_ASKED = 64
RIVALS = 4
"""So many servers of each block are asked first, where there are more than MOST_ASKED."""
AT_ONCE = 16
ASK_S = 5.0
COSTS_S = 120.0
"""How long costs and links are taken to stay as they are."""
LOAD_S = 8.0
RETRY_S, LONGEST_RETRY_S = 30.0, 600.0
REFRESH_SHARE = 1 / 3
"""Of the time that opening waits for servers of which nothing is known, where all are known."""
HALF_LIFE_S = 300.0
"""Of a correction: nobody is avoided for ever."""
LEAST_STEPS = 8
"""So many tokens of a session are a measurement."""


class Followed(Protocol):
    """What the survey reads of an open session."""

    @property
    def is_open(self) -> bool: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def pace(self) -> Pace: ...


@dataclass(slots=True)
class _Acquaintance:
    """A server: what it said and when, when it was asked last, and how often in vain."""

    facts: ServerFacts = ServerFacts()  # noqa: RUF009 - it is frozen
    links: tuple[tuple[PeerId, LinkFacts], ...] = ()
    heard_s: float = float("-inf")
    costs_s: float = float("-inf")
    asked_s: float = float("-inf")
    failures: int = 0
    correction: float = 1.0
    corrected_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether to ask it again."""
        if not self.failures:
            return now_s - self.heard_s > LOAD_S
        return now_s - self.asked_s > min(RETRY_S * 2 ** min(self.failures, 10), LONGEST_RETRY_S)

    def correction_at(self, now_s: float) -> float:
        """What is left of its correction."""
        return faded(self.correction, max(0.0, now_s - self.corrected_s), HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class _Stay:
    """A session of ours: how long its tokens were to take (0: don't compare), and what it holds."""

    session: weakref.ref[Followed]
    progress: Progress
    pace: Pace
    predicted_s: float
    rows: int
    kv_tokens: int
    since_s: float

    @property
    def is_over(self) -> bool:
        """Whether the session is closed, or was forgotten."""
        session = self.session()
        return session is None or not session.is_open


class Survey:
    """Everything here runs in the client's loop."""

    def __init__(self, connect: Connect, settings: ClientSettings, neighbours: Neighbours) -> None:
        self._connect = connect
        self._settings = settings
        self._neighbours = neighbours
        self._met: dict[PeerId, _Acquaintance] = {}
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._stays: list[_Stay] = []

    async def look(self, records: Sequence[ServerRecord], tasks: asyncio.TaskGroup) -> None:
        """Ask those that are due, in `tasks`; waits for a moment. Never raises."""
        if not self._settings.survey_s:
            return
        now_s, waited = asyncio.get_running_loop().time(), set[asyncio.Task[None]]()
        is_first = False
        for record in worth_asking(records):
            met = self._met.setdefault(record.peer, _Acquaintance())
            if record.peer not in self._asking and met.is_due(now_s):
                met.asked_s = now_s
                task = self._asking[record.peer] = tasks.create_task(self._ask(record, met))
                task.add_done_callback(lambda _, peer=record.peer: self._asking.pop(peer, None))
            if record.peer in self._asking and not met.failures:
                waited.add(self._asking[record.peer])
                is_first = is_first or met.heard_s < 0
        if waited:
            limit_s = self._settings.survey_s * (1.0 if is_first else REFRESH_SHARE)
            await asyncio.wait(waited, timeout=limit_s)

    async def _ask(self, record: ServerRecord, met: _Acquaintance) -> None:
        now = asyncio.get_running_loop().time
        wants_costs = now() - met.costs_s > COSTS_S
        asked = Describe(("costs", "links") if wants_costs else ())
        try:
            async with self._slots, asyncio.timeout(min(ASK_S, self._settings.connect_s)):
                told, rtt_s = await self._describe(record, asked)
        except (BloomBeeError, TimeoutError) as error:
            _log.debug("%s does not say what it costs: %s", record.peer, error)
            met.failures += 1
            return
        met.failures, met.heard_s = 0, now()
        known_s = met.facts.rtt_s
        nearest_s = rtt_s if known_s is None or wants_costs else min(rtt_s, known_s)
        met.facts = replace(facts_of(told, met.facts), rtt_s=nearest_s)
        if wants_costs:
            met.costs_s = met.heard_s
            ways = ((PeerId(report.peer), link_of(report)) for report in told.links)
            met.links = tuple((peer, link) for peer, link in ways if link is not None)

    async def _describe(self, record: ServerRecord, asked: Describe) -> tuple[Description, float]:
        """Its answer, and the time of a round trip, that of a stream on a way that is warm."""
        now = asyncio.get_running_loop().time
        failure: BloomBeeError = TransportError(f"{record.peer} announces no address")
        for endpoint in endpoints_of(record):
            try:
                told = await self._told(endpoint, asked)
                began_s = now()
                await (await self._connect(endpoint)).close()
            except TransportError as error:
                failure = error
            else:
                return told, now() - began_s
        raise failure

    async def _told(self, endpoint: Endpoint, asked: Describe) -> Description:
        connection = await self._connect(endpoint)
        try:
            await connection.send(asked)
            received = await connection.receive(ASK_S)
        finally:
            await connection.close()
        if received is None:
            raise TransportError(f"{endpoint.address} closed before it answered")
        if not isinstance(received[0], Description):
            raise ProtocolError(f"{endpoint.address} answered with {type(received[0]).__name__}")
        return received[0]

    # What is known --------------------------------------------------------------------

    def known(self) -> Knowledge:
        """All that is known now, our own load included."""
        now_s = asyncio.get_running_loop().time()
        self._settle(now_s)
        ways_s = {PeerId(r.peer): r.rtt_s for r in self._neighbours.reports(loop_us()) if r.rtt_s}
        rows, tokens = self._unheard()
        servers: dict[PeerId, ServerFacts] = {}
        links: dict[Ends, LinkFacts] = {}
        for peer in self._met.keys() | ways_s.keys() | rows.keys():
            met = self._met.get(peer) or _Acquaintance()
            free = met.facts.free_tokens
            servers[peer] = replace(
                met.facts,
                rtt_s=ways_s.get(peer, met.facts.rtt_s),
                decode_rows=met.facts.decode_rows + rows[peer],
                free_tokens=None if free is None else free - tokens[peer],
                correction=met.correction_at(now_s),
            )
            links.update({(peer, other): link for other, link in met.links})
        return Knowledge(servers, links)

    def follow(self, session: Followed, predicted_s: float, *, rows: int, kv_tokens: int) -> None:
        """Count a session that has opened, and see whether its tokens take as long as predicted.

        With `predicted_s` 0 that is not compared.
        """
        now_s = asyncio.get_running_loop().time()
        where = weakref.ref(session)
        stay = _Stay(where, session.progress, session.pace, predicted_s, rows, kv_tokens, now_s)
        self._stays.append(stay)

    def _unheard(self) -> tuple[Counter[PeerId], Counter[PeerId]]:
        """Rows and KV tokens that our sessions took of servers after these answered last."""
        rows, tokens = Counter[PeerId](), Counter[PeerId]()
        for stay in self._stays:
            for stage in stay.progress.route.stages:
                met = self._met.get(stage.peer)
                if met is None or met.heard_s < stay.since_s:
                    rows[stage.peer] += stay.rows
                    tokens[stage.peer] += stay.kv_tokens
        return rows, tokens

    def _settle(self, now_s: float) -> None:
        """Learn of sessions that are over, and forget them."""
        for stay in self._stays:
            if stay.is_over and stay.predicted_s and stay.pace.steps >= LEAST_STEPS:
                stages = stay.progress.route.stages
                for stage in stages:
                    met = self._met.setdefault(stage.peer, _Acquaintance())
                    before = met.correction_at(now_s)
                    met.correction = corrected(
                        before, stay.pace.token_s, stay.predicted_s, len(stages)
                    )
                    met.corrected_s = now_s
        self._stays = [stay for stay in self._stays if not stay.is_over]


def worth_asking(records: Sequence[ServerRecord]) -> list[ServerRecord]:
    """Those of which one could take another's place; where they are many, some of each block."""
    held = Counter(block for record in records for block in _blocks(record.span))
    rivals = [r for r in records if any(held[block] > 1 for block in _blocks(r.span))]
    if len(rivals) <= MOST_ASKED:
        return rivals
    rivals.sort(
        key=lambda record: (-record.throughput_tokens_per_s * len(record.span), record.peer)
    )
    taken, seen = list[ServerRecord](), Counter[int]()
    for record in rivals:
        if any(seen[block] < RIVALS for block in _blocks(record.span)):
            taken.append(record)
            seen.update(_blocks(record.span))
    rest = [record for record in rivals if record not in taken]
    return [*taken, *rest][:MOST_ASKED]


def _blocks(span: Span) -> Iterable[int]:
    return range(span.start, span.end)


def endpoints_of(record: ServerRecord) -> tuple[Endpoint, ...]:
    """Where a server listens; one without an address is reached through libp2p."""
    addresses = record.addresses or ("",)
    return tuple(Endpoint(record.peer, address, record.certificate_hash) for address in addresses)
