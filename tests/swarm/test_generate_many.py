"""Many prompts through a real swarm: same answers whatever happens, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.client import AsyncDistributedModelForCausalLM, Request, SamplingParams
from bloombee.errors import Unsupported
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.plain_decoding import PlainDecoding
from tests.swarm.disturbed import GREEDY, THREE, all_free, favour, same, spares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.models import ModelSource
    from bloombee.server.scheduler import Share, WorkItem
    from bloombee.server.stage import StageServer

NEW = 8
PROMPTS = [
    torch.randint(3, 200, (3 + number % 9,), generator=torch.Generator().manual_seed(number))
    for number in range(10)
]


def model_of(swarm: ClientSwarm, head: str) -> DistributedModelForCausalLM:
    model: Any = swarm.model()
    if head == "client":
        model.decode = PlainDecoding(model).decode
    return model


def greedy(local: Any, prompt: torch.Tensor) -> list[int]:
    arguments = {**GREEDY, "eos_token_id": 2}
    return local.generate(prompt[None], max_new_tokens=NEW, **arguments)[0, len(prompt) :].tolist()


HEADS = pytest.mark.parametrize("head", ["client", "server"])


@HEADS
def test_each_gets_what_it_would_get_alone(three: ClientSwarm, local: Any, head: str) -> None:
    model = model_of(three, head)
    found = list(model.generate_many(PROMPTS, max_new_tokens=NEW))
    assert [each.ids for each in found] == [greedy(local, prompt) for prompt in PROMPTS]
    assert all(each.usage.prompt_tokens == len(PROMPTS[each.index]) for each in found)
    all_free(three)


@HEADS
def test_seeds_make_answers_the_prompt_s_own(three: ClientSwarm, head: str) -> None:
    model = model_of(three, head)
    asked = [
        Request(prompt, SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed, n=1 + seed))
        for seed, prompt in enumerate(PROMPTS[:3])
    ]
    once = {each.index: each for each in model.generate_many(asked)}
    again = {
        2 - each.index: each
        for each in model.generate_many(asked[::-1], concurrency=1, ordered=False)
    }
    texts = {n: [choice.ids for choice in each.choices] for n, each in once.items()}
    assert texts == {n: [choice.ids for choice in each.choices] for n, each in again.items()}
    assert len({tuple(ids) for ids in texts[2]}) == 3


@HEADS
def test_where_kv_is_short_all_are_answered_all_the_same(
    source: ModelSource, local: Any, head: str
) -> None:
    with ClientSwarm(source, THREE, Size(kv_tokens=64)) as swarm:
        model = model_of(swarm, head)
        found = list(model.generate_many(PROMPTS, max_new_tokens=NEW))
        assert [each.ids for each in found] == [greedy(local, prompt) for prompt in PROMPTS]
        all_free(swarm)


@HEADS
def test_where_servers_take_few_sessions_of_a_peer_they_take_turns(
    source: ModelSource, local: Any, head: str
) -> None:
    with ClientSwarm(source, THREE, Size(kv_tokens=4096, sessions_per_peer=2)) as swarm:
        model = model_of(swarm, head)
        found = list(model.generate_many(PROMPTS, max_new_tokens=NEW, concurrency=5))
        assert [each.ids for each in found] == [greedy(local, prompt) for prompt in PROMPTS]
        rows = torch.stack([PROMPTS[0]] * 4)
        same(local, swarm.model(QUICK.model_copy(update={"micro_batches": 4})), rows)
        all_free(swarm)


def test_servers_schedule_them_behind_what_somebody_waits_for(three: ClientSwarm) -> None:
    """What `generate_many` asks for is told apart where passes are chosen, on every stage."""
    model = three.model()
    seen: list[set[bool]] = [set() for _ in three.stages]

    def watch(stage: StageServer, found: set[bool]) -> None:
        scheduler = stage.executor._scheduler
        choose = scheduler.next_batch

        def watched(queue: Sequence[WorkItem]) -> tuple[Share, ...]:
            found.update(item.background for item in queue)
            return choose(queue)

        scheduler.next_batch = watched

    for stage, found in zip(three.stages, seen, strict=True):
        watch(stage, found)
    list(model.generate_many(PROMPTS[:2], max_new_tokens=2))
    assert seen == [{True}] * 3
    for found in seen:
        found.clear()
    model.generate(PROMPTS[0][None], max_new_tokens=2, **GREEDY)
    assert seen == [{False}] * 3


@HEADS
def test_a_stage_dies_and_nobody_notices(three: ClientSwarm, local: Any, head: str) -> None:
    model = model_of(three, head)
    doomed = three.stages[1]
    spares(three, doomed.offer.span)
    favour(three, doomed)
    three.at_pass(doomed, 6, lambda: three.kill(doomed))
    found = list(model.generate_many(PROMPTS, max_new_tokens=NEW, concurrency=4))
    assert [each.ids for each in found] == [greedy(local, prompt) for prompt in PROMPTS]
    assert doomed not in three.alive()
    all_free(three)


@HEADS
def test_what_is_left_early_is_freed(three: ClientSwarm, head: str) -> None:
    model = model_of(three, head)
    long = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    prompts = [Request(PROMPTS[0], long)] * 2 + [PROMPTS[1]]
    for found in model.generate_many(prompts, max_new_tokens=1, ordered=False):
        assert found.index == 2
        break
    all_free(three)


@HEADS
def test_a_stream_in_a_loop_of_the_caller_s(three: ClientSwarm, local: Any, head: str) -> None:
    model = AsyncDistributedModelForCausalLM(model_of(three, head))

    async def read(prompt: torch.Tensor) -> list[int]:
        stream = model.stream(prompt, max_new_tokens=NEW, logprobs=1)
        deltas = [delta async for delta in stream]
        assert all(delta.token.logprob is not None for delta in deltas)
        assert [len(delta.token.alternatives) for delta in deltas] == [1] * len(deltas)
        assert [bool(delta.finish_reason) for delta in deltas[:-1]] == [False] * (len(deltas) - 1)
        assert deltas[-1].finish_reason in ("stop", "length")
        return [delta.token.id for delta in deltas]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*(read(prompt) for prompt in PROMPTS[:3]))

    assert asyncio.run(read_all()) == [greedy(local, prompt) for prompt in PROMPTS[:3]]


@HEADS
def test_a_stream_that_is_closed_is_freed(three: ClientSwarm, head: str) -> None:
    model = AsyncDistributedModelForCausalLM(model_of(three, head))

    async def read() -> None:
        stream = model.stream(PROMPTS[0], max_new_tokens=1000, ignore_eos=True)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        async with asyncio.TaskGroup() as group:
            whole = model.generate(PROMPTS[1], max_new_tokens=1000, ignore_eos=True)
            task = group.create_task(whole)
            await asyncio.sleep(0.3)
            task.cancel()

    asyncio.run(read())
    all_free(three)


def test_transformers_own_batch_is_refused_with_what_to_use(three: ClientSwarm) -> None:
    model = three.model()
    ids = [prompt.tolist() for prompt in PROMPTS[:2]]
    says = r"model\.generate_many\(prompts"
    threads = threading.active_count()
    with pytest.raises(Unsupported, match=says):
        model.generate_batch(inputs=ids)
    with pytest.raises(Unsupported, match=says):
        model.init_continuous_batching()
    with pytest.raises(Unsupported, match=says):
        model.continuous_batching_context_manager()
    with pytest.raises(Unsupported, match=says):
        model.generate(PROMPTS[0][None], cache_implementation="paged")
    assert threading.active_count() == threads
