"""Loops that are interrupted: stages replaced, links lost, a client that is far behind."""

from __future__ import annotations

import random

import pytest

from bloombee.protocol.messages import Operations, Sampling
from bloombee.transport.links import LinkShape
from tests.swarm.handing import MovingTalk, counted, whole
from tests.swarm.harness import Swarm, eventually, run
from tests.swarm.looping import LoopTalk, failed, packed
from tests.swarm.recovering import (
    KV_TOKENS,
    PROMPTS,
    digest_stage,
    model_of,
    only,
    steps_computed,
)

SPANS = [(0, 2), (2, 4), (4, 6)]
SAMPLINGS = {
    0: Sampling(12, seed=7, temperature=0.8, top_p=0.9),
    1: Sampling(4, seed=7, stream=1, temperature=1.3, top_k=40),
    2: Sampling(9, seed=3, temperature=2.0, frequency_penalty=0.5, context=packed(PROMPTS[2])),
}


async def ran(s: Swarm, *counts: int) -> None:
    """Wait until stages have computed so many steps."""

    async def done() -> bool:
        return steps_computed(s)[: len(counts)] == list(counts)

    await eventually(done, f"{counts} steps are computed")


class TestReplacedStages:
    @pytest.mark.parametrize("anew", [False, True], ids=["same number", "new number"])
    @pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1], [1, 2], [0, 2], []])
    def test_the_loop_goes_on(self, lost: list[int], anew: bool) -> None:
        """The stages have run ahead of the client by several steps, to the loop's end."""

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), only(s, 0, 1, 2))
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.hear(3)
            await ran(s, 12, 12, 12)
            for stage in lost:
                s.network.kill(s.stages[stage].endpoint.peer)
            route = [3 + stage if stage in lost else stage for stage in range(3)]
            await talk.move(only(s, *route))
            for stage in lost:
                await talk.refill(stage - 1, 2 * stage + 2)
            refilled = steps_computed(s)
            await talk.go_on(anew=anew)
            await talk.finish()
            again = [now - before for now, before in zip(steps_computed(s), refilled, strict=True)]
            # Nine steps were pending; who held them computes none, unless told to forget them.
            spares = [9 if stage in lost else 0 for stage in range(3)]
            kept = [9 if anew and stage not in lost else 0 for stage in range(3)]
            assert again == [*kept, *spares]
            await talk.session.close()

        run(*(digest_stage(*span) for span in [*SPANS, *SPANS]), test=test)

    def test_where_no_stage_was_ahead(self) -> None:
        """The last stage is lost with a step that it had not computed."""

        async def test(s: Swarm) -> None:
            middle, last = (s.stages[stage].endpoint.peer for stage in (1, 2))
            s.network.shape(middle, last, LinkShape(delay_s=0.2))
            talk = await LoopTalk.begin(s.client(), only(s, 0, 1, 2))
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.hear(2)
            await ran(s, 3, 3)
            s.network.kill(last)
            await talk.move(only(s, 0, 1, 3))
            await talk.refill(1, 6)
            await talk.go_on()
            await talk.finish()

        run(*(digest_stage(*span) for span in [*SPANS, SPANS[2]]), test=test)

    def test_one_after_the_other(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), only(s, 0, 1, 2))
            await talk.start(PROMPTS, SAMPLINGS)
            route = [0, 1, 2]
            for lost in (1, 2, 0):
                await talk.hear(2)
                s.network.kill(s.stages[lost].endpoint.peer)
                route[lost] += 3
                await talk.move(only(s, *route))
                await talk.refill(lost - 1, 2 * lost + 2)
                await talk.go_on()
            await talk.finish()
            await talk.session.close()
            assert (await s.free_tokens())[3:] == [KV_TOKENS] * 3

        run(*(digest_stage(*span) for span in [*SPANS, *SPANS]), test=test)


class TestLinks:
    def test_only_the_ring_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bloombee.server.downstream.SILENCE_S", 0.4)
        monkeypatch.setattr("bloombee.server.downstream.BEAT_S", 0.1)

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            (first,) = s.stages[0].sessions

            async def closed() -> bool:
                return first.looped is not None

            await eventually(closed, "the last stage leads to the first")
            model_of(setups[1]).gate.clear()
            await talk.start(PROMPTS, SAMPLINGS)
            s.network.partition([s.stages[0].endpoint.peer], [s.stages[2].endpoint.peer])
            model_of(setups[1]).gate.set()
            await talk.hear(1)
            lost = await failed(talk.links[2])
            assert (lost.code, lost.step) == ("hop-lost", 0)
            assert "the first stage" in lost.message
            s.network.heal()
            await talk.move(s.route())
            await talk.go_on()
            await talk.finish()
            assert steps_computed(s) == [12, 12, 12]

        setups = [digest_stage(*span) for span in SPANS]
        run(*setups, test=test)

    def test_the_client_comes_back_on_other_streams(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.hear(2)
            await talk.move(s.route(), redial=[0, 1, 2])
            await talk.go_on()
            await talk.finish()
            assert steps_computed(s) == [12, 12, 12]

        run(*(digest_stage(*span) for span in SPANS), test=test)

    def test_nothing_of_an_old_ring_comes_through(self) -> None:
        """A stage that is late: its loop step of the old epoch reaches the first stage after."""

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.hear(1)
            (first,) = s.stages[0].sessions
            old = first.looped
            await talk.move(s.route())
            assert first.looped is not old
            cut = Operations(truncates=tuple((q, 0) for q in PROMPTS))
            await talk.start(PROMPTS, SAMPLINGS, operations=cut)
            await talk.finish()

        run(*(digest_stage(*span) for span in SPANS), test=test)


class TestKept:
    def test_outputs_are_kept_until_they_are_answered(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.finish()
            (held,) = s.stages[1].sessions
            assert sorted(held.held.looping.kept) == list(range(1, 13))
            cut = Operations(truncates=tuple((q, 0) for q in PROMPTS))
            await talk.start(PROMPTS, SAMPLINGS, operations=cut, answered=12)
            await talk.finish()
            assert min(held.held.looping.kept) == 14

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_what_is_not_kept_is_made_anew(self) -> None:
        """The stage says so, starts empty in the next epoch, and is filled again."""

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.hear(3)
            await ran(s, 12, 12)
            await talk.move(s.route())
            (held,) = s.stages[1].sessions
            held.held.looping.answered(5)
            await talk.go_on()
            failure = await failed(talk.links[1])
            assert (failure.code, failure.step) == ("step-failed", 4)
            talk.newest = 3
            await talk.move(s.route())
            assert talk.session.opened[1].held_tokens == (0, 0, 0)
            await talk.refill(0, 6)
            await talk.go_on(anew=True)
            await talk.finish()

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)


class MovingLoop(LoopTalk, MovingTalk):
    """A loop whose stages may be fetched by others."""


class TestHandOver:
    @pytest.mark.parametrize("anew", [False, True], ids=["same number", "new number"])
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_loop_goes_on_at_another_server(self, index: int, anew: bool) -> None:
        async def test(s: Swarm) -> None:
            talk = await MovingLoop.begin(s.client(), only(s, 0, 1, 2))
            await talk.start(PROMPTS, SAMPLINGS)
            await talk.hear(3)
            await talk.hand_over(index, whole(s, 3))
            assert counted(s.stages[3], "fetched_sessions") == 1
            assert counted(s.stages[3], "fetches_given_up") == 0
            before = steps_computed(s)
            await talk.go_on(anew=anew)
            await talk.finish()
            if not anew:
                # Each stage computes what it had not, and the new one what the old had not.
                done = steps_computed(s)
                kept = [done[stage] for stage in range(3)]
                kept[index] += done[3]
                assert kept == [12] * 3
                assert before[3] == 0

        spans = [*SPANS, SPANS[index]]
        run(*(digest_stage(*span) for span in spans), test=test)


class TestAnything:
    @pytest.mark.parametrize("seed", range(4))
    def test_any_story_ends_with_the_same_tokens(self, seed: int) -> None:
        """Epochs begin at any moment; stages lose what they hold, and links, with them."""

        async def test(s: Swarm) -> None:
            dice = random.Random(seed)
            for _ in range(8):
                talk = await LoopTalk.begin(s.client(), s.route())
                await talk.start(PROMPTS, SAMPLINGS)
                while not talk.is_over and dice.random() < 0.8:
                    await talk.hear(dice.randrange(1, 4))
                    if not talk.is_over:
                        await self.interrupt(talk, s, dice)
                await talk.finish()
                await talk.session.close()
                assert await s.free_tokens() == [KV_TOKENS] * 3

        run(*(digest_stage(*span) for span in SPANS), test=test)

    @staticmethod
    async def interrupt(talk: LoopTalk, s: Swarm, dice: random.Random) -> None:
        fresh = [stage for stage in range(3) if dice.random() < 0.4]
        if dice.random() < 0.3:
            one, other = (s.stages[n].endpoint.peer for n in dice.sample(range(3), 2))
            for stream in s.network.streams_between(one, other):
                stream.reset()
        await talk.move(s.route(), fresh=fresh, redial=[n for n in range(3) if dice.random() < 0.3])
        for stage in fresh:
            await talk.refill(stage - 1, 2 * stage + 2)
        await talk.go_on(anew=dice.random() < 0.5)
