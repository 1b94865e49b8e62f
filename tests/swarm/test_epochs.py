"""A session goes on in later epochs: what stages keep, what they replay, what they refuse."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from bloombee.errors import AuthError, ProtocolError, RequestError, StaleEpoch, StepFailed
from bloombee.errors import Unsupported as NotSupported
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import (
    Acknowledged,
    Attach,
    Attached,
    Failed,
    Opened,
    Operations,
    Output,
)
from tests.swarm.harness import RouteStage, Swarm, eventually, expect, run
from tests.swarm.recovering import KV_TOKENS, MAX_LENGTH, SEQUENCES, Talk, digest_stage, model_of

TAKEN = SEQUENCES * MAX_LENGTH
PROMPTS = {0: [5, 7, 11], 1: [3, 1], 2: [8, 8, 8, 2]}
LENGTHS = {0: 3, 1: 2, 2: 4}


def steps_computed(s: Swarm) -> list[int]:
    return [int(stage.telemetry.snapshot()["steps"]) for stage in s.stages]


def only(s: Swarm, *stages: int) -> list[RouteStage]:
    """A route over some of the swarm's stages, each with its whole span."""
    return [RouteStage(s.stages[i], s.stages[i].offer.span) for i in stages]


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
            await _computed(s, 3, 3)
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
            await _computed(s, 3, 1)
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


class TestReplay:
    @pytest.mark.parametrize("lost", [0, 1, 2])
    def test_a_new_server_takes_the_place_of_a_lost_one(self, lost: int) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), only(s, 0, 1, 2))
            await talk.step(PROMPTS)
            for token in range(5):
                await talk.step({0: [token], 1: [token + 1], 2: [token + 2]})
            moves = Operations(forks=((0, 1), (1, 0)), truncates=((2, 3),))
            await talk.step({0: [9], 1: [9], 2: [1]}, operations=moves)
            computed = steps_computed(s)
            s.network.kill(s.stages[lost].endpoint.peer)
            route = [0, 1, 2]
            route[lost] = 3 + lost
            await talk.move(only(s, *route))
            lengths = {i: len(ids) for i, ids in talk.truth.ids.items()}
            end = 2 * lost + 2
            if lost:
                await talk.rebuild(lost - 1, end, lengths, as_of=7)
            else:
                await talk.feed(lengths, end, as_of=7)
            await talk.step({0: [4], 1: [5], 2: [6]})
            # The others computed that step, and nothing of what was replayed.
            for other in {0, 1, 2} - {lost}:
                assert steps_computed(s)[other] == computed[other] + 1

        spans = [(0, 2), (2, 4), (4, 6)]
        run(*(digest_stage(*span) for span in [*spans, *spans]), test=test)

    def test_two_new_servers_with_another_cut(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), only(s, 0, 1, 2))
            await talk.step(PROMPTS)
            await talk.step({0: [4], 2: [4]})
            for stage in s.stages[1:3]:
                s.network.kill(stage.endpoint.peer)
            await talk.move(only(s, 0, 3, 4))
            await talk.rebuild(0, 6, {0: 4, 1: 2, 2: 5}, as_of=2)
            for moved in (await talk.move(only(s, 0, 3, 4)))[1:]:
                assert (moved.held_tokens, moved.newest_steps) == ((4, 2, 5), (2, 2, 2))
            await talk.step({0: [1], 1: [2], 2: [3]})
            # The new stages have journals of their own.
            await talk.move(only(s, 0, 3, 4), fresh=[2])
            await talk.rebuild(1, 6, {0: 5, 1: 3, 2: 6}, as_of=3)
            await talk.step({0: [1], 1: [2], 2: [3]})

        spans = [(0, 2), (2, 4), (4, 6), (2, 3), (3, 6)]
        run(*(digest_stage(*span) for span in spans), test=test)

    def test_in_parts_with_a_released_sequence(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await talk.step({0: [4]}, operations=Operations(releases=(2,)))
            await talk.move(s.route(), fresh=[1])
            for sequence, first, count, releases in ((0, 0, 2, (2,)), (0, 2, 2, ()), (1, 0, 2, ())):
                await talk.rebuild(
                    0,
                    6,
                    {sequence: count},
                    as_of=2,
                    first_positions=(first,),
                    releases=releases,
                )
            await talk.step({0: [1], 1: [2]})
            with pytest.raises(RequestError, match="released"):
                await talk.send({2: [1]})
                raise to_error(await expect(talk.links[0], Failed))
            last = (await talk.move(s.route()))[1]
            assert (last.held_tokens, last.newest_steps) == ((5, 3, 0), (6, 6, 0))

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_operations_of_a_pending_step_are_done_once(self) -> None:
        """Stage 0 had applied a step with forks that the lost stage 1 never answered."""

        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), only(s, 0, 1, 2))
            await talk.step(PROMPTS)
            s.network.kill(s.stages[1].endpoint.peer)
            swap = Operations(forks=((0, 1), (1, 0)), truncates=((2, 2),))
            pending = await talk.send({0: [4], 1: [5], 2: [6]}, operations=swap)
            await _computed(s, 2, 1, 1, 0)
            opened = await talk.move(only(s, 0, 3, 2))
            assert [each.newest_steps for each in opened] == [(2, 2, 2), (0, 0, 0), (1, 1, 1)]
            # The rows up to the pending step's first positions: after its operations.
            before = {0: 2, 1: 3, 2: 2}
            await talk.rebuild(0, 4, before, as_of=1, included=(2,))
            await talk.again(pending)
            await talk.check(pending)
            await talk.step({0: [1], 1: [2], 2: [3]})

        spans = [(0, 2), (2, 4), (4, 6), (2, 4)]
        run(*(digest_stage(*span) for span in spans), test=test)

    def test_a_stage_that_was_rebuilt_passes_on_which_operations_are_done(self) -> None:
        """Stage 2 is lost while the step whose operations stage 1 was rebuilt with is pending."""

        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), only(s, 0, 1, 2))
            await talk.step(PROMPTS)
            s.network.kill(s.stages[1].endpoint.peer)
            swap = Operations(forks=((0, 1), (1, 0)), releases=(2,))
            pending = await talk.send({0: [4], 1: [5]}, operations=swap)
            await _computed(s, 2, 1, 1, 0, 0)
            await talk.move(only(s, 0, 3, 2))
            before = {0: 2, 1: 3}
            await talk.rebuild(0, 4, before, as_of=1, included=(2,), releases=(2,))
            s.network.kill(s.stages[2].endpoint.peer)
            opened = await talk.move(only(s, 0, 3, 4))
            assert opened[1].newest_steps == (1, 1, 0)
            await talk.rebuild(1, 6, before, as_of=1, releases=(2,))
            await talk.again(pending)
            await talk.check(pending)
            await talk.step({0: [1], 1: [2]})

        spans = [(0, 2), (2, 4), (4, 6), (2, 4), (4, 6)]
        run(*(digest_stage(*span) for span in spans), test=test)

    def test_a_repeat_is_dropped(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await talk.move(s.route(), fresh=[1])
            message = talk.replay(LENGTHS, 6, 1)
            await talk.links[0].send(message)
            assert (await expect(talk.links[1], Output)).payload.rows == 0
            await talk.links[0].send(message)
            assert (await expect(talk.links[1], Acknowledged)).step == message.step
            await talk.step({0: [1], 1: [2], 2: [3]})

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    @pytest.mark.parametrize(
        ("changes", "code", "says"),
        [
            ({"counts": (9, 2, 4)}, "protocol", "not in the journal"),
            ({"until": 3}, "protocol", "nothing to replay"),
            ({"epoch": 0}, "stale-epoch", "replay of epoch 0"),
            ({"sequences": (0, 1, 7)}, "request", "sequence 7"),
            ({"sequences": (0, 1, 1)}, "protocol", "distinct"),
            ({"counts": (60, 2, 4)}, "request", "at most 64"),
        ],
    )
    def test_what_cannot_be_replayed(
        self, changes: dict[str, object], code: str, says: str
    ) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await talk.move(s.route(), fresh=[1])
            message = msgspec.structs.replace(talk.replay(LENGTHS, 6, 1), **changes)
            await talk.links[0].send(message)
            failed = await expect(talk.links[0], Failed)
            assert (failed.code, failed.step) == (code, message.step)
            assert says in failed.message

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)

    def test_the_last_stage_has_nothing_to_replay(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            await talk.links[1].send(talk.replay(LENGTHS, 9, 1))
            with pytest.raises(ProtocolError, match="nothing to replay from blocks 3:6"):
                await expect(talk.links[1], Output)

        run(digest_stage(0, 3), digest_stage(3, 6), test=test)


class TestFailedSteps:
    @pytest.mark.parametrize("stage", [0, 1])
    def test_the_stage_starts_empty_in_the_next_epoch(self, stage: int) -> None:
        async def test(s: Swarm) -> None:
            other = await Talk.open(s.client(), s.route())
            await other.step(PROMPTS)
            talk = await Talk.open(s.client(), s.route())
            await talk.step(PROMPTS)
            model_of(setups[stage]).failures.append(ValueError("bad luck"))
            failing = await talk.send({0: [4]})
            failed = await expect(talk.links[stage], Failed)
            assert (failed.code, failed.step) == ("step-failed", 2)
            assert "bad luck" in failed.message
            opened = await talk.move(s.route())
            assert opened[stage].held_tokens == (0, 0, 0)
            assert opened[1 - stage].held_tokens == (3 + (stage == 1), 2, 4)
            if stage:
                await talk.rebuild(0, 6, LENGTHS, as_of=1)
            else:
                await talk.feed(LENGTHS, 3, as_of=1)
            await talk.again(failing)
            await talk.check(failing)
            await talk.step({0: [1], 1: [2], 2: [3]})
            await other.step({0: [1], 1: [2], 2: [3]})

        setups = [digest_stage(0, 3), digest_stage(3, 6)]
        run(*setups, test=test)

    def test_what_follows_in_the_same_epoch_is_refused(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await Talk.open(s.client(), s.route())
            model_of(setups[0]).failures.append(ValueError("bad luck"))
            await talk.send({0: [4]})
            await expect(talk.links[0], Failed)
            await talk.send({0: [5]})
            with pytest.raises(StepFailed, match="bad luck.* starts anew in the next epoch"):
                raise to_error(await expect(talk.links[0], Failed))

        setups = [digest_stage(0, 3), digest_stage(3, 6)]
        run(*setups, test=test)


def _one_row(talk: Talk) -> tuple[object, dict[int, tuple[int, int]]]:
    from tests.swarm.chaos.digests import embed

    return embed([4], [3]), {0: (3, 1)}


async def _computed(s: Swarm, *counts: int) -> None:
    """Wait until each stage has taken so many steps, and has computed them."""

    async def done() -> bool:
        quiet = all(not held.held.computing for stage in s.stages for held in stage.sessions)
        return quiet and steps_computed(s) == list(counts)

    await eventually(done, f"{counts} steps are computed")


def _count_of(s: Swarm, stage: int, count: int):
    async def reached() -> bool:
        return steps_computed(s)[stage] == count

    return reached
