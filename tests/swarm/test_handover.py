"""Sessions handed from one server to another by hand: what moves, and what happens if it can't.

Stages compute digests, so one wrong, lost or doubled row of KV, journal or output shows
in every answer after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from bloombee.core import Span
from bloombee.errors import PeerStopping
from bloombee.models import open_source
from bloombee.protocol import framing
from bloombee.protocol.messages import (
    Beat,
    Close,
    Closed,
    Failed,
    Fetch,
    HandedOver,
    Hop,
    Leaving,
    Open,
    Opened,
    Operations,
    Pages,
    Source,
)
from bloombee.server import fetching
from bloombee.server.handover import HandOvers
from bloombee.swarm.connection import ConnectionSettings, accept
from bloombee.swarm.identity import Identity
from bloombee.transport.links import LinkShape
from tests.swarm.harness import (
    RawClient,
    RawSession,
    RouteStage,
    StageSetup,
    Swarm,
    expect,
    run,
    stage_of,
)
from tests.swarm.recovering import KV_TOKENS, PATIENCE_S, Talk, digest_stage, model_of
from tests.swarm.test_admission import virtually
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from bloombee.server.stage import StageServer
    from bloombee.swarm.connection import Connection
    from bloombee.transport.interface import Stream

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


MOVES = {"first": (0, Span(0, 2)), "middle": (1, Span(2, 4)), "last": (2, Span(4, 6))}


class TestMoving:
    @pytest.mark.parametrize(("index", "span"), MOVES.values(), ids=MOVES)
    def test_a_session_goes_on_where_it_was(self, index: int, span: Span) -> None:
        setups = three(span)

        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            opened, old = await talk.hand_over(index, whole(s, 3))
            assert opened.held_tokens == HELD
            assert opened.newest_steps == (3, 3, 3)
            assert counted(s.stages[index], "handed_over_sessions") == 1
            assert counted(s.stages[3], "fetched_sessions") == 1
            assert counted(s.stages[3], "steps") == 0
            await close_at(old, talk)
            for _ in range(3):
                await talk.step({1: [6], 2: [1]})
            await talk.step({2: [7]}, operations=Operations(forks=((1, 2),)))
            assert await s.free_tokens() == [
                KV_TOKENS if stage is s.stages[index] else KV_TOKENS - 2 * 32 for stage in s.stages
            ]
            await talk.session.close()
            assert await s.free_tokens() == [KV_TOKENS] * 4
            for setup in setups:
                setup.pool.check_integrity()

        run(*setups, test=test)

    def test_the_end_of_a_wider_span(self) -> None:
        """The spare serves the blocks 3:4 of 2:4; the stage before it takes the rest."""

        async def test(s: Swarm) -> None:
            route = [RouteStage(s.stages[0], Span(0, 2)), whole(s, 1), whole(s, 2)]
            talk = await MovingTalk.open(s.client(), route)
            await talk.step(PROMPTS)
            talk.sources = {1: talk.source(1)}
            route = [
                RouteStage(s.stages[0], Span(0, 3)),
                RouteStage(s.stages[3], Span(3, 4)),
                route[2],
            ]
            opened = await talk.move(route, fresh=[0, 1])
            assert [each.held_tokens for each in opened] == [(0, 0, 0), (3, 2, 4), (3, 2, 4)]
            await talk.feed({0: 3, 1: 2, 2: 4}, 3, as_of=1)
            await talk.step({0: [1], 1: [2], 2: [3]})

        run(
            digest_stage(0, 3),
            digest_stage(2, 4),
            digest_stage(4, 6),
            digest_stage(1, 5),
            test=test,
        )

    def test_what_moved_can_be_replayed(self) -> None:
        """The journal came along: the stage after the new one is lost next."""

        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            await talk.hand_over(1, whole(s, 3))
            s.network.kill(s.stages[2].endpoint.peer)
            await talk.move([whole(s, 0), whole(s, 3), whole(s, 4)], fresh=[2])
            released = {"releases": (0,)}
            await talk.rebuild(1, 6, {1: 5, 2: 3}, as_of=3, **released)
            await talk.step({1: [6], 2: [1]})

        run(*three(Span(2, 4)), digest_stage(4, 6), test=test)

    def test_it_can_move_again(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            for target in (3, 1, 3):
                opened, old = await talk.hand_over(1, whole(s, target))
                assert opened.held_tokens[0] == 0 and sum(opened.held_tokens) >= sum(HELD)
                await close_at(old, talk)
                await talk.step({1: [6], 2: [1]})

        run(*three(Span(2, 4)), test=test)

    def test_outputs_that_did_not_arrive_come_along(self) -> None:
        """The client sends a step, hears nothing of it, and asks the new last stage."""

        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            sent = await talk.send({1: [6], 2: [1]}, answered=3)
            async with asyncio.timeout(PATIENCE_S):
                while counted(s.stages[2], "steps") < 4:  # noqa: ASYNC110 - has no event
                    await asyncio.sleep(0.005)
            opened, _ = await talk.hand_over(2, whole(s, 3))
            assert opened.newest_steps == (3, 4, 4)
            await talk.again(sent)
            await talk.check(sent)
            assert counted(s.stages[3], "steps") == 0
            await talk.step({1: [2]})

        run(*three(Span(4, 6)), test=test)

    def test_steps_that_are_computing_are_waited_for(self) -> None:
        setups = three(Span(4, 6))
        gate = model_of(setups[2]).gate

        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            gate.clear()
            sent = await talk.send({1: [6], 2: [1]}, answered=3)
            async with asyncio.timeout(PATIENCE_S):
                while counted(s.stages[2], "steps") < 4:  # noqa: ASYNC110 - has no event
                    await asyncio.sleep(0.005)
            asyncio.get_running_loop().call_later(0.2, gate.set)
            opened, _ = await talk.hand_over(2, whole(s, 3))
            assert opened.held_tokens == (0, 6, 4)
            await talk.again(sent)
            await talk.check(sent)

        run(*setups, test=test)

    def test_a_parked_session_comes_back_to_move(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            stage = s.stages[1]
            other = await s.client().open([whole(s, 1)], sequences=11, max_length=32, wait_s=10.0)
            assert stage.admission.is_away(talk.session.id)
            await other.close()
            opened, _ = await talk.hand_over(1, whole(s, 3))
            assert opened.held_tokens == HELD
            await talk.step({1: [6], 2: [1]})

        setups = three(Span(2, 4))
        parks = replace(setups[1], limits=replace(setups[1].limits, park_idle_s=0.5))
        virtually(setups[0], parks, *setups[2:], test=test)


class TestNotMoving:
    """The new stage starts empty, and the session goes on by replay."""

    async def replayed(self, s: Swarm, talk: MovingTalk, opened: Opened) -> None:
        assert opened.held_tokens == (0, 0, 0)
        assert opened.newest_steps == (0, 0, 0)
        assert counted(s.stages[3], "fetches_given_up") == 1
        await talk.rebuild(0, 4, {1: 5, 2: 3}, as_of=3, releases=(0,))
        assert counted(s.stages[3], "steps") == 1
        await talk.step({1: [6], 2: [1]})

    @pytest.mark.parametrize(
        "wrong",
        [{"secret": b"x" * 16}, {"epoch": 7}, {"limit_s": 0.0}],
        ids=["secret", "epoch", "no time"],
    )
    def test_what_is_asked_for_wrongly(self, wrong: dict[str, Any]) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            opened, _ = await talk.hand_over(1, whole(s, 3), talk.source(1, **wrong))
            await self.replayed(s, talk, opened)
            assert counted(s.stages[1], "handed_over_sessions") == 0

        run(*three(Span(2, 4)), test=test)

    def test_strangers_stop_nothing(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            link = await s.client().connect(s.stages[1])
            for session, secret in (
                (talk.session.id, b"x" * 16),
                (b"y" * 16, talk.session.secret),
            ):
                await link.send(Fetch(session, secret, 0, 2, 4))
                received = await link.receive(PATIENCE_S)
                assert received is not None and isinstance(received[0], Failed)
                assert received[0].code == "auth"
            await talk.step({1: [6], 2: [1]})

        run(*three(Span(2, 4)), test=test)

    def test_only_the_end_of_a_span_can_move(self) -> None:
        """Nobody has kept what block 2 put out, so the stage of 2:3 starts empty."""

        async def test(s: Swarm) -> None:
            def part(index: int, start: int, end: int) -> RouteStage:
                return RouteStage(s.stages[index], Span(start, end))

            route = [whole(s, 0), whole(s, 1), part(2, 4, 6)]
            talk = await MovingTalk.open(s.client(), route)
            await talk.step(PROMPTS)
            talk.sources = {1: talk.source(1)}
            opened = await talk.move([route[0], part(3, 2, 3), part(2, 3, 6)], fresh=[1, 2])
            assert [each.held_tokens for each in opened[1:]] == [(0, 0, 0)] * 2
            assert counted(s.stages[1], "handed_over_sessions") == 0
            await talk.rebuild(0, 6, {0: 3, 1: 2, 2: 4}, as_of=1)
            await talk.step({0: [1], 1: [2], 2: [3]})

        spans = ((0, 2), (2, 4), (3, 6), (2, 4))
        run(*(digest_stage(*span) for span in spans), test=test)

    def test_the_old_server_dies_in_the_middle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HandOvers, "piece_bytes", 64)

        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            old, new = s.stages[1].endpoint.peer, s.stages[3].endpoint.peer
            s.network.shape(old, new, LinkShape(bytes_per_s=3000.0))
            asyncio.get_running_loop().call_later(0.3, s.network.kill, old)
            opened, _ = await talk.hand_over(1, whole(s, 3))
            await self.replayed(s, talk, opened)

        run(*three(Span(2, 4)), test=test)

    def test_the_link_is_too_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Known after the first pages, long before the limit."""
        monkeypatch.setattr(HandOvers, "piece_bytes", 64)
        monkeypatch.setattr("bloombee.planner.handover.SAMPLE_BYTES", 100)

        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            old, new = s.stages[1].endpoint.peer, s.stages[3].endpoint.peer
            s.network.shape(old, new, LinkShape(bytes_per_s=100.0))
            began_s = asyncio.get_running_loop().time()
            opened, _ = await talk.hand_over(1, whole(s, 3), talk.source(1, limit_s=8.0))
            assert asyncio.get_running_loop().time() - began_s < 7.0
            await self.replayed(s, talk, opened)

        virtually(*three(Span(2, 4)), test=test)

    def test_the_link_is_cut(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            old, new = s.stages[1].endpoint.peer, s.stages[3].endpoint.peer
            s.network.cut(old, new)
            began_s = asyncio.get_running_loop().time()
            opened, _ = await talk.hand_over(1, whole(s, 3))
            assert asyncio.get_running_loop().time() - began_s <= 11.0
            await self.replayed(s, talk, opened)

        virtually(*three(Span(2, 4)), test=test)


Word = tuple[Any, bytes]


def page(request: Fetch, **changes: Any) -> Word:
    """The three tokens of sequence 0 on the first block; there should be another."""
    told = Pages(request.session, "kv", 0, request.start, 0, 3, "float32", 96, 3)
    return msgspec.structs.replace(told, **changes), bytes(48)


def book(request: Fetch, *lengths: int) -> Word:
    return HandedOver(request.session, lengths, (1, 1, 1), (False, False, False)), b""


LIES: dict[str, Callable[[Fetch], list[Word]]] = {
    "a book without pages": lambda asked: [book(asked, 3, 0, 0)],
    "a book of other pages": lambda asked: [
        page(asked),
        page(asked, block=3),
        book(asked, 3, 1, 0),
    ],
    "a book before the last page": lambda asked: [page(asked), book(asked, 3, 0, 0)],
    "pages of another block": lambda asked: [page(asked, block=4)],
    "pages of another type": lambda asked: [page(asked, dtype="bfloat16")],
    "more than a session holds": lambda asked: [page(asked, total_bytes=1 << 30)],
    "an end in the middle": lambda asked: [page(asked)],
    "an error": lambda asked: [(Failed(asked.session, 0, 0, "request", "no"), b"")],
    "something else": lambda asked: [(Beat(asked.session, 1), b"")],
    "nothing": lambda asked: [],
}


@contextlib.asynccontextmanager
async def liar(s: Swarm, lie: Callable[[Fetch], list[Word]], *, hangs: bool) -> AsyncIterator[Hop]:
    """A server that answers Fetch with `lie`, and then ends the stream, or says nothing."""
    identity = Identity.load_or_create(None)
    listener = s.network.listener(identity.peer_id)

    async def serve(stream: Stream) -> None:
        link = await accept(stream, identity, b"", settings=ConnectionSettings())
        received = await link.receive(PATIENCE_S)
        assert received is not None and isinstance(received[0], Fetch)
        for message, payload in lie(received[0]):
            # The state machine of an honest server would refuse some of it.
            await stream.send(framing.encode(message, payload))
        if hangs:
            await link.receive(PATIENCE_S * 10)

    await listener.start(serve)
    try:
        yield Hop(identity.peer_id, listener.address, b"")
    finally:
        await listener.stop(0.0)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_liar_gives_nothing(lie: Callable[[Fetch], list[Word]], hangs: bool) -> None:
    setups = three(Span(2, 4))

    async def test(s: Swarm) -> None:
        talk = await moving(s, 0, 1, 2)
        async with liar(s, lie, hangs=hangs) as hop:
            began_s = asyncio.get_running_loop().time()
            opened, _ = await talk.hand_over(1, whole(s, 3), talk.source(1, hop=hop))
            assert asyncio.get_running_loop().time() - began_s <= fetching.SILENCE_S + 0.1
        assert opened.held_tokens == (0, 0, 0)
        assert counted(s.stages[3], "fetches_given_up") == 1
        setups[3].pool.check_integrity()
        await talk.rebuild(0, 4, {1: 5, 2: 3}, as_of=3, releases=(0,))
        await talk.step({1: [6], 2: [1]})

    virtually(*setups, test=test)


class TestDraining:
    def test_clients_are_told_and_new_ones_refused(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            old = s.stages[1]
            async with asyncio.TaskGroup() as group:
                draining = group.create_task(old.drain(20.0))
                leaving = await expect(talk.links[1], Leaving)
                assert (leaving.session, leaving.epoch) == (talk.session.id, 0)
                assert 19.0 < leaving.deadline_s <= 20.0
                with pytest.raises(PeerStopping):
                    await s.client().open([whole(s, 1)], sequences=1, max_length=8)
                await talk.step({1: [6], 2: [1]})  # it serves on until the session moves
                _, link = await talk.hand_over(1, whole(s, 3))
                assert not draining.done()
                await close_at(link, talk)
                async with asyncio.timeout(1.0):
                    await draining
            await talk.step({1: [6], 2: [1]})

        run(*three(Span(2, 4)), test=test)

    def test_a_session_that_recovers_meanwhile_is_told_again(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await moving(s, 0, 1, 2)
            async with asyncio.TaskGroup() as group:
                draining = group.create_task(s.stages[1].drain(20.0))
                assert (await expect(talk.links[1], Leaving)).epoch == 0
                await talk.move(talk.route)
                assert (await expect(talk.links[1], Leaving)).epoch == 1
                await talk.step({1: [6], 2: [1]})
                await talk.session.close()
                await draining

        run(*three(Span(2, 4)), test=test)

    def test_it_ends_in_time_whatever_clients_do(self) -> None:
        async def test(s: Swarm) -> None:
            clock = asyncio.get_running_loop().time
            await moving(s, 0, 1, 2)
            began_s = clock()
            await s.stages[1].drain(3.0)
            assert clock() - began_s == pytest.approx(3.0, abs=0.1)
            began_s = clock()
            await s.stages[3].drain(3.0)
            assert clock() - began_s < 0.1

        virtually(*three(Span(2, 4)), test=test)

    def test_a_client_that_cannot_hear_holds_nothing_up(self) -> None:
        async def test(s: Swarm) -> None:
            clock = asyncio.get_running_loop().time
            talk = await moving(s, 0, 1, 2)
            s.network.partition(talk.client.identity.peer_id, s.stages[1].endpoint.peer)
            began_s = clock()
            await s.stages[1].drain(2.0)
            assert clock() - began_s < 2.6

        virtually(*three(Span(2, 4)), test=test)


def test_the_kv_of_a_model_is_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny real model: long sequences in several pieces, a fork, a release, a cut."""
    monkeypatch.setattr(HandOvers, "piece_bytes", 2000)
    source = open_source(str(tiny_model("llama", tmp_path)))
    setups = [stage_of(source, Span(0, 5)), stage_of(source, Span(1, 5))]
    numbers = torch.Generator().manual_seed(0)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, source.hidden_size, generator=numbers)

    async def test(s: Swarm) -> None:
        span, first, second = Span(2, 5), *s.stages
        session = await s.client().open([RouteStage(first, span)], sequences=4, max_length=300)
        await session.step(rows(260), {0: (0, 200), 1: (0, 40), 3: (0, 20)})
        forked = Operations(forks=((2, 0),), truncates=((2, 150),), releases=(1,))
        await session.step(rows(2), {0: (200, 1), 2: (150, 1)}, operations=forked)
        where = RouteStage(first, span).hop
        origin = Source(where, session.secret, 0, LIMIT_S)
        link = await s.client().connect(second)
        await link.send(
            Open(
                session=session.id,
                secret=b"n" * 16,
                epoch=1,
                fingerprint=source.fingerprint,
                start=2,
                end=5,
                sequences=4,
                max_length=300,
                dtype="float32",
                source=origin,
            )
        )
        opened = await expect(link, Opened)
        assert opened.held_tokens == (201, 0, 151, 20)
        assert opened.newest_steps == (2, 2, 2, 1)
        for sequence, length in ((0, 201), (2, 151), (3, 20)):
            for block in range(2, 5):
                old, new = (
                    each.pool.export(session.id, sequence, block, 0, length) for each in setups
                )
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        moved = RawSession(session.id, b"n" * 16, [link], [opened])
        moved.steps, moved.epoch = 2, 1
        following = rows(3)
        table = {0: (201, 1), 2: (151, 1), 3: (20, 1)}
        got = await moved.step(following, table, want="all")
        reference = await s.client().open([RouteStage(first, span)], sequences=4, max_length=300)
        numbers.manual_seed(0)
        await reference.step(rows(260), {0: (0, 200), 1: (0, 40), 3: (0, 20)})
        await reference.step(rows(2), {0: (200, 1), 2: (150, 1)}, operations=forked)
        assert torch.equal(got, await reference.step(following, table, want="all"))

    run(*setups, test=test)
    for setup in setups:
        setup.pool.check_integrity()
