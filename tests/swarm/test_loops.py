"""The last stage chooses tokens and feeds them to the first, while the client only listens."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from bloombee.errors import BloomBeeError, ProtocolError, RequestError
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import (
    Acknowledged,
    Attach,
    Attached,
    Operations,
    Output,
    Payload,
    Sampling,
)
from tests.swarm.harness import Swarm, expect, run
from tests.swarm.looping import (
    GREEDY,
    SAMPLED,
    Expected,
    LoopTalk,
    Samplings,
    expected,
    failed,
    packed,
    stages,
)
from tests.swarm.recovering import (
    KV_TOKENS,
    MAX_LENGTH,
    PROMPTS,
    SEQUENCES,
    digest_stage,
    model_of,
    steps_computed,
)

TAKEN = SEQUENCES * MAX_LENGTH


def with_stop(samplings: Samplings, sequence: int, after: int) -> Samplings:
    """The same, but that a sequence is stopped by the token that it gets as number `after`."""
    token = expected(PROMPTS, samplings)[sequence].ids[after]
    stopping = msgspec.structs.replace(samplings[sequence], stop_ids=(token,))
    return samplings | {sequence: stopping}


class TestLoops:
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("samplings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_tokens_come_without_another_word(self, count: int, samplings: Samplings) -> None:
        stopped = with_stop(samplings, 2, 3)

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, stopped)
            said = [link.counters.frames_sent for link in talk.links]
            heard = await talk.hear()
            talk.check_tokens()
            assert len(heard) == 12
            assert talk.came[2].finished == "stop" and len(talk.came[2].ids) <= 4
            assert (talk.came[0].finished, talk.came[1].finished) == ("length", "length")
            assert [link.counters.frames_sent for link in talk.links] == said
            # The last tokens of a sequence are fed to nobody.
            assert steps_computed(s) == [12] * count
            assert await s.free_tokens() == [KV_TOKENS - TAKEN] * count
            await talk.session.close()
            assert await s.free_tokens() == [KV_TOKENS] * count

        run(*stages(count), test=test)

    def test_one_loop_after_the_other(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            for _ in range(2):
                await talk.start(PROMPTS, SAMPLED, operations=_cleared(talk))
                await talk.finish()

        run(*stages(2), test=test)

    def test_many_share_the_stages(self) -> None:
        """Each pass takes a third of the twelve sequences that decode: one session at a time."""

        async def test(s: Swarm) -> None:
            talks = [await LoopTalk.begin(s.client(), s.route()) for _ in range(4)]
            for number, talk in enumerate(talks):
                prompts = {q: [number, *ids] for q, ids in PROMPTS.items()}
                context = packed(prompts[2])
                penalised = msgspec.structs.replace(SAMPLED[2], context=context)
                await talk.start(prompts, SAMPLED | {2: penalised})
            async with asyncio.TaskGroup() as group:
                for talk in talks:
                    group.create_task(talk.finish())
            for talk in talks:
                await talk.session.close()
            assert await s.free_tokens() == [KV_TOKENS] * 3

        run(*stages(3), test=test)

    def test_a_prompt_in_parts(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            part = {0: (0, 2), 1: (0, 2)}
            sampling = (None, SAMPLED[1])
            await talk.say(talk.ask([5, 7, 3, 1], part, SAMPLED, loop=False, sampling=sampling))
            first, ids = await talk.session.answer()
            assert (first.sequences, first.positions) == ((1,), (2,))
            assert ids.tolist() == [[expected(PROMPTS, SAMPLED)[1].ids[0]]]
            await talk.say(talk.ask([5, 7], {2: (0, 2)}, SAMPLED, loop=False, sampling=(None,)))
            nothing, ids = await talk.session.answer()
            assert (nothing.sequences, len(ids), nothing.payload.content) == ((), 0, "ids")

        run(*stages(2), test=test)

    def test_log_probabilities(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start({0: [1, 2], 1: [3]}, {0: Sampling(3, logprobs=3), 1: Sampling(3)})
            for output in await talk.hear():
                assert [len(each) for each in output.alternatives] == [2, 0]
                assert output.alternatives[0][0][1] == output.logprobs[0] < 0

        run(*stages(2), test=test)

    def test_a_step_that_fails_ends_it(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            model_of(setups[1]).gate.clear()
            await talk.start(PROMPTS, GREEDY)
            model_of(setups[1]).failures.append(RuntimeError("no memory"))
            model_of(setups[1]).gate.set()
            failure = await failed(talk.links[1])
            assert (failure.step, failure.code) == (1, "step-failed")
            await talk.move(s.route())
            assert [o.held_tokens for o in talk.session.opened] == [(3, 2, 4), (0, 0, 0)]
            # The prompt is sent once more; the first stage computes nothing.
            ids = [i for ids in PROMPTS.values() for i in ids]
            table = {q: (0, len(ids)) for q, ids in PROMPTS.items()}
            await talk.say(talk.ask(ids, table, GREEDY, step=1))
            await talk.finish()
            assert steps_computed(s)[0] == 12

        setups = stages(2)
        run(*setups, test=test)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"ids": [4096]}, "carries id 4096, the model knows 0 to 4095"),
            ({"ids": [-1]}, "carries id -1"),
            ({"sampling": (Sampling(1, temperature=-1.0),)}, "temperature -1.0"),
            ({"sampling": (Sampling(1, temperature=float("nan")),)}, "temperature nan"),
            ({"sampling": (Sampling(1, top_p=1.5),)}, "top_p"),
            ({"sampling": (Sampling(1, min_p=1.5),)}, "min_p"),
            ({"sampling": (Sampling(1, repetition_penalty=0.0),)}, "repetition_penalty"),
            ({"sampling": (Sampling(0),)}, "budget"),
            ({"sampling": (Sampling(1, stop_ids=(4096,)),)}, "id 4096"),
            ({"sampling": (Sampling(1, logit_bias=((5000, 1.0),)),)}, "id 5000"),
            ({"sampling": (Sampling(1, context=b"123"),)}, "context"),
            ({"sampling": (Sampling(1), Sampling(1))}, "2 of 1 sequences"),
            ({"sampling": ()}, "without sampling"),
            ({"sampling": (Sampling(33),)}, "33 tokens"),
        ],
    )
    @pytest.mark.parametrize("count", [1, 2])
    def test_before_anything_is_computed(
        self, count: int, changes: dict[str, Any], says: str
    ) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            rest = dict(changes)
            ids = rest.pop("ids", [1])
            await talk.say(talk.ask(ids, {0: (0, 1)}, {0: Sampling(1)}, **rest))
            failure = await failed(talk.links[0])
            error = to_error(failure)
            assert failure.step == 1 and says in str(error) and "\n" not in str(error)
            assert isinstance(error, BloomBeeError)
            assert steps_computed(s) == [0] * count

        run(*stages(count), test=test)

    def test_ids_at_a_later_stage_and_a_loop_that_nobody_began(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            step = talk.ask([1], {0: (0, 1)}, GREEDY)
            (held,) = s.stages[1].sessions
            held.upstream = None
            await talk.links[1].send(step.message, bytes(4))
            failure = await failed(talk.links[1])
            assert isinstance(to_error(failure), RequestError)
            rows = Payload("rows", "float32", 1, 2)
            changes: dict[str, Any] = {"sampling": (), "payload": rows}
            await talk.links[1].send(msgspec.structs.replace(step.message, **changes), bytes(8))
            failure = await failed(talk.links[1])
            assert "has no sampling" in failure.message

        run(*stages(2), test=test)

    def test_a_route_that_ends_before_the_model(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, GREEDY)
            failure = await failed(talk.links[1])
            assert (failure.code, failure.step) == ("unsupported", 1)
            assert steps_computed(s) == [1, 0]

        run(digest_stage(0, 2), digest_stage(2, 4), test=test)

    def test_a_second_ring_and_one_to_the_middle(self) -> None:
        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            await talk.start(PROMPTS, GREEDY)
            await talk.finish()
            for stage, secret, error in (
                (0, talk.session.secret, ProtocolError),
                (1, talk.session.secret, ProtocolError),
                (0, b"wrong" * 4, BloomBeeError),
            ):
                link = await talk.client.connect(s.stages[stage])
                await link.send(Attach(talk.session.id, secret[:16], 0, ring=True))
                with pytest.raises(error):
                    await expect(link, Attached)

        run(*stages(3), test=test)


class TestTwice:
    @pytest.mark.parametrize("count", [1, 2])
    def test_a_loop_never_runs_in_two_copies(self, count: int) -> None:
        """The client sends the step that the ring sends as well, in the same epoch."""

        async def test(s: Swarm) -> None:
            talk = await LoopTalk.begin(s.client(), s.route())
            model_of(setups[-1]).gate.clear()
            first = talk.ask([5, 7, 11], {0: (0, 3)}, {0: GREEDY[0]})
            talk.prompts, talk.samplings = {0: [5, 7, 11]}, {0: GREEDY[0]}
            talk.came = {0: Expected()}
            await talk.say(first)
            token = expected(talk.prompts, talk.samplings)[0].ids[0]
            copy = talk.ask([token], {0: (3, 1)}, {0: Sampling(11, drawn=1)}, step=2)
            await talk.say(copy)
            talk.newest = 0
            await talk.say(copy)
            word = await expect(talk.links[0], Acknowledged)
            assert word.step == 2
            model_of(setups[-1]).gate.set()
            if count > 1:
                word = await expect(talk.links[0], Acknowledged)  # the ring's
                assert word.step == 2
                await talk.finish()
            else:
                await _finish_among(talk)
            assert steps_computed(s) == [12] * count

        setups = stages(count)
        run(*setups, test=test)


async def _finish_among(talk: LoopTalk) -> None:
    """As `finish`, where the word on the repeat comes on the same stream."""
    while not talk.is_over:
        received = await talk.links[0].receive(5.0)
        assert received is not None
        message, body = received
        if isinstance(message, Output):
            talk.take(message, torch.frombuffer(bytearray(body), dtype=torch.int32).tolist())
        else:
            assert isinstance(message, Acknowledged)
    talk.check_tokens()


def _cleared(talk: LoopTalk) -> Operations:
    return Operations(truncates=tuple((q, 0) for q in talk.prompts))
