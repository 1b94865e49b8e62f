"""Stages that lost what they held are filled again: replays, and steps that failed."""

from __future__ import annotations

import msgspec
import pytest

from bloombee.errors import ProtocolError, RequestError, StepFailed
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import Acknowledged, Failed, Operations, Output
from tests.swarm.harness import Swarm, expect, run
from tests.swarm.recovering import (
    LENGTHS,
    PROMPTS,
    Talk,
    computed,
    digest_stage,
    model_of,
    only,
    steps_computed,
)


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
            await computed(s, 2, 1, 1, 0)
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
            await computed(s, 2, 1, 1, 0, 0)
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
