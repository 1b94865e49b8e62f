"""Sessions whose stages are handed to other servers by hand: what those tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from bloombee.core import Span
from bloombee.protocol.messages import Close, Closed, Open, Opened, Operations, Source
from tests.swarm.harness import RawClient, RawSession, RouteStage, StageSetup, Swarm
from tests.swarm.recovering import PATIENCE_S, Talk, digest_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.server.stage import StageServer
    from bloombee.swarm.connection import Connection

LIMIT_S = 20.0
PROMPTS = {0: [5, 7, 11], 1: [3, 1], 2: [8, 8, 8, 2]}
FORKED = Operations(forks=((1, 0), (0, 1)), truncates=((2, 1),))
RELEASED = Operations(releases=(0,))


class MovingTalk(Talk):
    """A session whose stages may be fetched: `sources` by index in the route."""

    def __init__(self, client: RawClient, route: Sequence[RouteStage], session: RawSession) -> None:
        super().__init__(client, route, session)
        self.sources: dict[int, Source] = {}

    def opening(self, index: int, *, resume: bool = True) -> Open:
        opening = super().opening(index, resume=resume)
        return msgspec.structs.replace(opening, source=self.sources.get(index))

    def source(self, index: int, **changes: Any) -> Source:
        """Where what the stage of `index` holds can be had."""
        session = self.session
        plain = Source(self.route[index].hop, session.secret, session.epoch, LIMIT_S)
        return msgspec.structs.replace(plain, **changes)

    async def hand_over(
        self, index: int, to: RouteStage, source: Source | None = None
    ) -> tuple[Opened, Connection]:
        """Move one stage; what the new one says, and the stream to the old one."""
        self.sources = {index: source or self.source(index)}
        old = self.links[index]
        route = [*self.route[:index], to, *self.route[index + 1 :]]
        opened = await self.move(route, fresh=[index])
        self.sources = {}
        return opened[index], old


async def moving(s: Swarm, *stages: int) -> MovingTalk:
    """A session with forks, a truncation and a release behind it, on these stages."""
    route = [whole(s, index) for index in stages]
    talk = await MovingTalk.open(s.client(), route)
    await talk.step(PROMPTS)
    await talk.step({1: [9], 2: [4]}, operations=FORKED)
    await talk.step({1: [2], 2: [3]}, operations=RELEASED)
    return talk


HELD = (0, 5, 3)
"""What the sequences of such a session hold, as of step 3."""


def whole(s: Swarm, index: int) -> RouteStage:
    return RouteStage(s.stages[index], s.stages[index].offer.span)


def counted(stage: StageServer, name: str) -> int:
    return int(stage.telemetry.snapshot()[name])


async def close_at(link: Connection, talk: Talk) -> None:
    """Close the session at a server that it has left."""
    await link.send(Close(talk.session.id))
    while not isinstance((await link.receive(PATIENCE_S) or ("nothing",))[0], Closed):
        pass


def three(spare: Span) -> tuple[StageSetup, ...]:
    """Three stages, and a spare that overlaps one of them."""
    spans = (Span(0, 2), Span(2, 4), Span(4, 6), spare)
    return tuple(digest_stage(span.start, span.end) for span in spans)
