"""Sessions handed from one server to another by hand: what moves, and what happens if it can't.

Stages compute digests, so one wrong, lost or doubled row of KV, journal or output shows
in every answer after it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bloombee.core import Span
from bloombee.protocol.messages import (
    Failed,
    Fetch,
    Opened,
    Operations,
)
from bloombee.server.handover import HandOvers
from bloombee.transport.links import LinkShape
from tests.swarm.handing import (
    HELD,
    PROMPTS,
    MovingTalk,
    close_at,
    counted,
    moving,
    three,
    whole,
)
from tests.swarm.harness import (
    RouteStage,
    Swarm,
    run,
)
from tests.swarm.recovering import KV_TOKENS, PATIENCE_S, digest_stage, model_of
from tests.swarm.test_admission import virtually

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
