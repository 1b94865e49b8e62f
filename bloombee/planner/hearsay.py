"""What a client knows of servers and of the links between them, by their word and its own.

Servers are strangers: what they say of themselves is bounded here, so that nobody computes
in no time or stands next to everybody. `correction` is what the client itself found, as a
multiple of what was promised. All of it may be unknown; routing has usual values for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bloombee.core import PeerId
from bloombee.planner.profiles import TimeTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bloombee.protocol.messages import Description, LinkReport, TimeGrid

LEAST_BLOCK_S = 1e-5
"""No machine computes a block of a model worth a swarm sooner."""
MOST_S = 600.0
MOST_RTT_S = 30.0
MOST_BYTES_PER_S = 1e11
LEAST_BYTES_PER_S = 100.0
STALE_LINK_S = 600.0
"""After so long without a measurement a link may have changed altogether."""
MOST_CORRECTION = 20.0
LEAST_CORRECTION = 1.0
"""One that outdoes what was promised, or usual, has no advantage: those untried might, too."""
AS_PROMISED = 1.25
"""Times that differ by less say nothing."""
SHARED = 0.5
"""How far one session moves the corrections of servers that share the blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What is known of one server besides its record; None is unknown.

    `busy` and `decode_rows` as in `Description`; `rtt_s` as the client measured it.
    """

    decode: TimeTable | None = None
    prefill: TimeTable | None = None
    head: TimeTable | None = None
    pass_s: float = 0.0
    busy: float = 0.0
    decode_rows: int = 0
    waiting: int = 0
    free_tokens: int | None = None
    rtt_s: float | None = None
    correction: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One directed link: seconds one way and bytes a second; 0 is unknown."""

    alpha_s: float = 0.0
    bytes_per_s: float = 0.0


Ends = tuple[PeerId, PeerId]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All that a client knows; `links` from the first peer to the second."""

    servers: Mapping[PeerId, ServerFacts] = field(default_factory=dict[PeerId, ServerFacts])
    links: Mapping[Ends, LinkFacts] = field(default_factory=dict[Ends, LinkFacts])

    def of(self, peer: PeerId) -> ServerFacts:
        """What is known of a server, which may be nothing."""
        return self.servers.get(peer, _STRANGER)


_STRANGER = ServerFacts()
NOTHING = Knowledge()


def facts_of(description: Description, before: ServerFacts = _STRANGER) -> ServerFacts:
    """What a server's description tells, as far as it can be; costs of `before` if it has none."""
    busy = description.busy if math.isfinite(description.busy) else 0.0
    costs = description.costs
    return ServerFacts(
        decode=before.decode if costs is None else table_of(costs.decode),
        prefill=before.prefill if costs is None else table_of(costs.prefill),
        head=before.head if costs is None else _head(costs.head),
        pass_s=before.pass_s if costs is None else _bounded(costs.pass_s),
        busy=min(max(busy, 0.0), 1.0),
        decode_rows=min(description.decode_rows, 1 << 16),
        waiting=min(description.waiting, 1 << 10),
        free_tokens=description.free_tokens,
        rtt_s=before.rtt_s,
        correction=before.correction,
    )


def table_of(grid: TimeGrid) -> TimeTable | None:
    """A server's times, none quicker than possible; None when it makes no sense."""
    values = [second for line in grid.seconds for second in line]
    if not all(math.isfinite(value) and 0 <= value <= MOST_S for value in values):
        return None
    seconds = tuple(tuple(max(LEAST_BLOCK_S, s) for s in line) for line in grid.seconds)
    try:
        return TimeTable(grid.rows, grid.contexts, seconds)
    except ValueError:
        return None


def _head(grid: TimeGrid | None) -> TimeTable | None:
    return None if grid is None else table_of(grid)


def _bounded(seconds: float) -> float:
    return min(seconds, MOST_S) if math.isfinite(seconds) and seconds > 0 else 0.0


def link_of(report: LinkReport) -> LinkFacts | None:
    """What a report tells of a link; None when it is too old or makes no sense."""
    if not 0 <= report.age_s <= STALE_LINK_S:
        return None
    alpha_s = report.rtt_s / 2 if 0 < report.rtt_s <= MOST_RTT_S else 0.0
    rate = report.bytes_per_s
    bytes_per_s = rate if LEAST_BYTES_PER_S <= rate <= MOST_BYTES_PER_S else 0.0
    return LinkFacts(alpha_s, bytes_per_s) if alpha_s or bytes_per_s else None


def corrected(correction: float, observed_s: float, predicted_s: float, stages: int = 1) -> float:
    """A server's correction after a token on its route took so long instead of as predicted."""
    if not (observed_s > 0 and predicted_s > 0):
        return correction
    ratio = observed_s / predicted_s
    if 1 / AS_PROMISED <= ratio <= AS_PROMISED:
        return correction
    return min(
        max(correction * ratio ** (1.0 if stages == 1 else SHARED), LEAST_CORRECTION),
        MOST_CORRECTION,
    )


def faded(correction: float, age_s: float, half_life_s: float) -> float:
    """What is left of a correction after a while: nobody is avoided for ever."""
    return correction ** (0.5 ** (age_s / half_life_s))
