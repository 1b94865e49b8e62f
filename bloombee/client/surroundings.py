"""What a session asks of the swarm around it: who could hold blocks, and how to reach them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bloombee.client.links import Connect
from bloombee.client.terms import SessionTerms
from bloombee.config.client import ClientSettings
from bloombee.core import PeerId, Span, Stage
from bloombee.planner.neighbours import Neighbours
from bloombee.planner.recovery import PeerHealth
from bloombee.swarm.warming import Warmer
from bloombee.transport.interface import Endpoint


@dataclass(frozen=True, slots=True)
class Holder:
    """A stage that could be had, and where its peer listens, best first."""

    stage: Stage
    endpoints: tuple[Endpoint, ...]


class Surroundings(Protocol):
    """The swarm, as all sessions of one client see it.

    `health` and `neighbours`, what is known of peers and of the links to them, are theirs in
    common.
    """

    settings: ClientSettings
    connect: Connect
    health: PeerHealth
    neighbours: Neighbours
    warmer: Warmer

    async def holders(
        self, span: Span, terms: SessionTerms, *, busy: Mapping[PeerId, str], fresh: bool
    ) -> list[Holder]:
        """Stages that cover `span`, of peers that are neither `busy` nor left out for now.

        `busy` says why they are. With `fresh` the swarm is looked at again. Raises
        SwarmError when blocks have no holder, RequestError when the session is too large
        for those there are.
        """
        ...

    def has_holders(self, span: Span, terms: SessionTerms, busy: Mapping[PeerId, str]) -> bool:
        """Whether `holders` would find any as of the last look, with those left out for now."""
        ...

    async def spares(
        self, span: Span, terms: SessionTerms, busy: Mapping[PeerId, str], kept: Sequence[Holder]
    ) -> Sequence[Holder]:
        """As `holders`, for when they are needed; `kept`, if any, where they still are `fit`."""
        ...

    def fit(self, holders: Sequence[Holder], busy: Mapping[PeerId, str]) -> bool:
        """Whether `holders`, chosen before, could still be had as of the last look."""
        ...

    def endpoints(self, peer: PeerId) -> tuple[Endpoint, ...]:
        """Where `peer` listens, as of the last look; empty when it was not seen."""
        ...

    def serves(self, peer: PeerId, span: Span) -> bool:
        """Whether `peer` may hold `span`: unless it was seen with other blocks."""
        ...
