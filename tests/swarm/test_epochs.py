"""A session goes on in later epochs: what stages keep, what they replay, what they refuse."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from bloombee.errors import AuthError, ProtocolError, RequestError, StaleEpoch
from bloombee.errors import Unsupported as NotSupported
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import (
    Acknowledged,
    Attach,
    Attached,
    Failed,
    Opened,
    Operations,
)
from tests.swarm.harness import Swarm, eventually, expect, run
from tests.swarm.recovering import (
    KV_TOKENS,
    LENGTHS,
    MAX_LENGTH,
    PROMPTS,
    SEQUENCES,
    Talk,
    computed,
    digest_stage,
    model_of,
    steps_computed,
)

if TYPE_CHECKING:
    import torch

TAKEN = SEQUENCES * MAX_LENGTH


class TestGoingOn:
    def test_stages_that_resume_keep_what_they_hold(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await talk.step({1: [9]})
            for opened in await talk.move(s.route()):
                assert opened.epoch == 1
                assert opened.held_tokens == (3, 3, 4)
                assert opened.newest_steps == (1, 2, 1)
            await talk.step({0: [4], 1: [6], 2: [6]})
            assert steps_computed(s) == [3, 3]
            assert await s.free_tokens() == [KV_TOKENS - TAKEN] * 2
            await talk.session.close()
            assert await s.free_tokens() == [KV_TOKENS] * 2

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_another_stream_of_the_same_client_takes_over(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            old = list(talk.links)
            await talk.move(s.route(), redial=[0, 1])
            for link in old:
                assert await link.receive(5.0) is None
            await talk.step({0: [4]})
            assert [len(stage.sessions) for stage in s.stages] == [1, 1]

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_another_client_does_not(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            thief = Talk(s.client(), s.route(), talk.session)
            link = await thief.client.connect(s.stages[0])
            await link.send(msgspec.structs.replace(talk.opening(0), epoch=1))
            with pytest.raises(RequestError, match="choose another id"):
                await expect(link, Opened)
            await talk.step(PROMPTS)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_without_resume_a_stage_starts_empty(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            first, second = await talk.move(s.route(), fresh=[1])
            assert (first.held_tokens, second.held_tokens) == ((3, 2, 4), (0, 0, 0))
            assert second.newest_steps == (0, 0, 0)
            assert await s.free_tokens() == [KV_TOKENS - TAKEN] * 2
            await talk.rebuild(0, 6, LENGTHS, as_of=1)
            await talk.step({0: [4], 1: [5], 2: [6]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_resuming_with_other_terms_is_refused_and_changes_nothing(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            for changes in ({"sequences": 2}, {"max_length": 16}, {"dtype": "bfloat16"}):
                link = await talk.client.connect(s.stages[1])
                changed = msgspec.structs.replace(talk.opening(1), epoch=1, **changes)
                await link.send(changed)
                with pytest.raises(NotSupported, match="open it anew"):
                    await expect(link, Opened)
            await talk.step({0: [4]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_resuming_what_nobody_holds_starts_empty(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route(), epoch=4, resume=True)
            assert [o.held_tokens for o in talk.session.opened] == [(0, 0, 0)] * 2
            await talk.step(PROMPTS)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)


class TestOlderEpochs:
    def test_steps_of_them_are_refused_in_their_own_epoch(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            old = talk.session.message(*_one_row(talk), epoch=0)
            await talk.move(s.route())
            await talk.links[0].send(old, bytes(8))
            failed = await expect(talk.links[0], Failed)
            assert (failed.code, failed.epoch, failed.step) == ("stale-epoch", 0, old.step)
            await talk.step({0: [4]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_the_old_secret_and_the_old_stage_before_are_out(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            (held,) = s.stages[1].sessions
            upstream, secret = held.upstream, talk.session.secret
            await talk.move(s.route())
            await talk.step({0: [4]})
            assert held.upstream is not upstream
            for epoch, error in ((0, StaleEpoch), (1, AuthError)):
                link = await talk.client.connect(s.stages[1])
                await link.send(Attach(talk.session.id, secret, epoch))
                with pytest.raises(error):
                    await expect(link, Attached)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_a_stage_before_waits_for_the_epoch_it_was_told(self) -> None:
        """The Open of stage 0 comes first; its link stands once stage 1 has moved too."""

        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            talk.session.epoch, talk.session.secret = 1, b"s" * 16
            await talk.links[0].send(talk.opening(0))
            await expect(talk.links[0], Opened)
            sent = await talk.send({0: [4]})
            await asyncio.sleep(0.1)
            await talk.links[1].send(talk.opening(1))
            await expect(talk.links[1], Opened)
            await talk.check(sent)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)


class TestStepsSentAgain:
    def test_a_stage_that_has_computed_them_does_not_do_so_again(self) -> None:
        """Lost on the way back: all stages have applied the steps, the client has no answer."""

        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            moves = Operations(forks=((1, 0),), truncates=((2, 1),))
            sent = [
                await talk.send({1: [4, 5], 2: [6]}, operations=moves),
                await talk.send({1: [7]}),
            ]
            await computed(s, 3, 3)
            await talk.move(s.route(), redial=[1])
            await talk.again(*sent)
            await talk.check(*sent)
            assert steps_computed(s) == [3, 3]
            await talk.step({0: [1], 1: [2], 2: [3]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_one_that_has_not_computes_them(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            s.network.partition([s.stages[0].endpoint.peer], [s.stages[1].endpoint.peer])
            sent = [await talk.send({0: [4]}), await talk.send({0: [5], 1: [5]})]
            await computed(s, 3, 1)
            await talk.begin_move(s.route())
            s.network.heal()
            first, second = [await talk.opened(link) for link in talk.links]
            assert (first.newest_steps, second.newest_steps) == ((3, 3, 1), (1, 1, 1))
            await talk.again(*sent)
            await talk.check(*sent)
            assert steps_computed(s) == [3, 3]

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_what_was_taken_is_computed_before_the_epoch_begins(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            model_of(setups[0]).gate.clear()
            sent = [await talk.send({0: [4]}), await talk.send({0: [5]})]
            await eventually(_count_of(s, 0, 3), "both are taken")
            await talk.begin_move(s.route())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await talk.links[0].receive()
            model_of(setups[0]).gate.set()
            first, second = [await talk.opened(link) for link in talk.links]
            assert (first.held_tokens, second.held_tokens) == ((5, 2, 4), (3, 2, 4))
            await talk.again(*sent)
            await talk.check(*sent)
            assert model_of(setups[0]).passes == [9, 1, 1]

        setups = [digest_stage(0, 3), digest_stage(3, 6)]
        run(*setups, test=test)

    def test_in_the_same_epoch_they_are_dropped(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            sent = await talk.send(PROMPTS)
            await talk.check(sent)
            await talk.move(s.route())
            await talk.again(sent)
            await talk.check(sent)
            await talk.again(sent)
            repeated = await expect(talk.links[0], Acknowledged)
            assert (repeated.epoch, repeated.step) == (1, 1)
            with pytest.raises(ProtocolError, match="after step 1"):
                wrong = msgspec.structs.replace(sent.message, first_positions=(1, 0, 0))
                await talk.session.send(wrong, sent.rows)
                raise to_error(await expect(talk.links[0], Failed))

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_outputs_are_kept_until_the_client_has_them(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            first, second = await talk.send({0: [4]}), await talk.send({0: [5]})
            await talk.check(first, second)
            (held,) = s.stages[1].sessions
            assert sorted(held.held.outputs.kept) == [1, 2]
            await talk.step({0: [6]}, answered=1)
            assert sorted(held.held.outputs.kept) == [2, 3]
            await talk.move(s.route())
            await talk.again(second)
            await talk.check(second)
            # What the client has said to have is not held: nothing can be made of it.
            await talk.move(s.route())
            await talk.again(first)
            failed = await expect(talk.links[1], Failed)
            assert (failed.code, failed.step) == ("step-failed", 1)
            assert (await talk.move(s.route()))[1].held_tokens == (0, 0, 0)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)


def _one_row(talk: Talk) -> tuple[torch.Tensor, dict[int, tuple[int, int]]]:
    from tests.swarm.chaos.digests import embed

    return embed([4], [3]), {0: (3, 1)}


def _count_of(s: Swarm, stage: int, count: int):
    async def reached() -> bool:
        return steps_computed(s)[stage] == count

    return reached
