"""Servers that drain, the servers they hand over to, and those that lie to these.

Stages compute digests, so one wrong, lost or doubled row of KV, journal or output shows
in every answer after it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from tests.swarm.harness import (
    RawSession,
    RouteStage,
    Swarm,
    expect,
    run,
    stage_of,
)
from tests.swarm.recovering import PATIENCE_S
from tests.swarm.test_admission import virtually
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from bloombee.transport.interface import Stream

from tests.swarm.handing import LIMIT_S, close_at, counted, moving, three, whole

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
