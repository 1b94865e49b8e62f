"""Many prompts, some of which fail: who waits, who goes on, and what is left."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.client.async_model import AsyncDistributedModelForCausalLM
from bloombee.client.crew import Places
from bloombee.client.parameters import SamplingParams
from bloombee.client.prompts import Request
from bloombee.errors import KVFull, RequestError, StepFailed, SwarmError
from tests.scripted_model import MAX_LENGTH, ScriptedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEXTS = [f"{letter}{number}" for number, letter in enumerate("abcdefghijklmnopqrst")]


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    assert model.open == 0
    model.close()


def test_answers_come_in_the_order_of_the_prompts(model: ScriptedModel) -> None:
    model.reply = lambda prompt, _: list(bytes(prompt) * (1 + (100 - prompt[0]) % 7))
    found = list(model.generate_many(TEXTS, concurrency=4))
    assert [each.index for each in found] == list(range(len(TEXTS)))
    assert [each.text[: len(text)] for each, text in zip(found, TEXTS, strict=True)] == TEXTS
    assert model.most_open == 4


def test_or_as_they_finish(model: ScriptedModel) -> None:
    model.pause_s = 0.005
    model.reply = lambda prompt, _: list(prompt) if prompt[0] != ord("a") else [65] * 90
    found = list(model.generate_many(TEXTS, concurrency=4, ordered=False))
    assert sorted(each.index for each in found) == list(range(len(TEXTS)))
    assert found[-1].index == 0
    assert found[-1].ids == [65] * 90


def test_a_finished_one_is_replaced_at_once_though_the_first_takes_long(
    model: ScriptedModel,
) -> None:
    model.reply = lambda prompt, _: list(prompt) if prompt[0] != ord("a") else [65] * 100
    found = model.generate_many(TEXTS * 3, concurrency=2)
    assert next(found).ids == [65] * 100
    assert model.opened > 2 * 2 + 1
    found.close()


def test_one_that_fails_takes_nothing_with_it(model: ScriptedModel) -> None:
    model.failures[ord("c")] = StepFailed("a stage says no")
    prompts: list[Any] = [*TEXTS, "", [1, 2, 300], "x" * MAX_LENGTH, 7]
    found = list(model.generate_many(prompts))
    errors = {each.index: str(each.error) for each in found if each.error is not None}
    assert errors == {
        2: "a stage says no",
        20: "the prompt is empty: give it at least one token",
        21: "token id 300 is not one of the model's 256",
        22: "1000 tokens and up to 128 new ones are more than scripted takes (1000): "
        "shorten the prompt or max_new_tokens",
        23: "a prompt is a text, token ids or messages, not a int",
    }
    with pytest.raises(StepFailed, match="a stage says no"):
        _ = found[2].text
    assert [each.text for each in found[3:20]] == TEXTS[3:]


def test_one_that_the_swarm_fails_is_tried_again_for_a_while(model: ScriptedModel) -> None:
    model.failures[ord("c")] = SwarmError("no server holds blocks 1:2")
    model.patience = 30

    def mend() -> None:
        wait_until(lambda: model.opened > len(TEXTS))
        model.failures.clear()

    mending = threading.Thread(target=mend)
    mending.start()
    assert [each.text for each in model.generate_many(TEXTS)] == TEXTS
    mending.join()
    model.failures[ord("c")] = SwarmError("no server holds blocks 1:2")
    model.patience = 0
    (found,) = model.generate_many(["cc"])
    assert isinstance(found.error, SwarmError)


def test_a_bug_is_raised_and_nothing_goes_on(model: ScriptedModel) -> None:
    model.failures[ord("c")] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        list(model.generate_many(TEXTS))
    assert model.open == 0


def test_where_room_is_short_fewer_are_in_flight_and_all_are_answered(
    model: ScriptedModel,
) -> None:
    model.room = 3
    found = list(model.generate_many(TEXTS * 2, concurrency=16))
    assert [each.text for each in found] == TEXTS * 2
    assert model.most_open == 3


def test_without_room_for_a_single_one_it_fails(model: ScriptedModel) -> None:
    model.room = 1
    prompts = [Request("two", SamplingParams(n=2)), "one"]
    two, one = model.generate_many(prompts)
    assert isinstance(two.error, KVFull)
    assert one.text == "one"


@given(st.integers(1, 8), st.lists(st.booleans(), max_size=200))
def test_places_never_run_out(most: int, rooms: list[bool]) -> None:
    """Whatever servers say, a waiting prompt gets a place again; it is told when it won't."""
    places = Places(most)
    for has_room in rooms:
        assert 1 <= places.limit <= most
        while places.is_free:
            places.taken += 1
        assert places.taken == places.limit
        if has_room:
            places.ended()
            continue
        alone = places.taken == 1
        assert places.found_no_room(places.given_back) is not alone


def test_leaving_the_loop_frees_all(model: ScriptedModel) -> None:
    model.reply = lambda *_: [65] * 900
    model.pause_s = 0.01
    prompts = ["a", Request("b", SamplingParams(max_new_tokens=1))] * 8
    for found in model.generate_many(prompts, ordered=False):
        assert found.index % 2
        assert model.open >= 8
        break
    wait_until(lambda: not model.open)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not become so")


def test_an_interrupt_frees_all_and_keeps_what_was_finished(model: ScriptedModel) -> None:
    model.pause_s = 0.01
    model.reply = lambda prompt, _: [65] * 100 if prompt[0] == ord("a") else list(prompt)
    main = threading.main_thread().ident
    assert main is not None

    def wait_for_it() -> None:
        while model.opened < 3:
            threading.Event().wait(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    found = model.generate_many(["ab", "b", "ac"], concurrency=2)
    killer = threading.Thread(target=wait_for_it)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        next(found)
    killer.join()
    assert model.open == 0
    assert [each.text for each in found.finished()] == ["b"]
    assert list(found) == []


def test_what_prompts_raise_is_raised(model: ScriptedModel) -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(model.generate_many(broken()))


def test_prompts_are_read_only_as_far_as_needed(model: ScriptedModel) -> None:
    numbers = itertools.count()
    endless = (f"a{number}" for number in numbers)
    with model.generate_many(endless, concurrency=2) as found:
        assert [next(found).text for _ in range(10)] == [f"a{n}" for n in range(10)]
    assert next(numbers) < 30


# What is asked for --------------------------------------------------------------------------


def test_seeds_are_those_of_the_prompt_alone(model: ScriptedModel) -> None:
    asked = SamplingParams(temperature=1.0, seed=5, n=3)
    list(model.generate_many(["a", Request("b", asked), "c"], temperature=0.5, seed=9))
    by_size = sorted(model.asked, key=len)
    assert [(s.seed, s.stream) for s in by_size[-1]] == [(5, 0), (5, 1), (5, 2)]
    assert [[(s.seed, s.stream) for s in each] for each in by_size[:2]] == [[(9, 0)]] * 2


def test_without_a_seed_each_draws_its_own(model: ScriptedModel) -> None:
    list(model.generate_many(["a", "b"], temperature=1.0))
    assert len({each[0].seed for each in model.asked}) == 2


def test_the_model_s_own_end_is_one_of_the_stop_ids(model: ScriptedModel) -> None:
    requests = [
        Request("a", SamplingParams(stop_ids=(7,))),
        Request("b", SamplingParams(ignore_eos=True, logprobs=2)),
    ]
    list(model.generate_many(requests, concurrency=1))
    assert [each[0].stop_ids for each in model.asked] == [(0, 7), ()]
    assert [each[0].logprobs for each in model.asked] == [0, 3]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: give an integer from 1 to"),
        ({"temperature": -1}, "temperature=-1: give a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0: give a number above 0 to 1"),
        ({"seed": 1 << 63}, "seed=9223372036854775808"),
        ({"stop": [""]}, "stop=''"),
        ({"logit_bias": {-1: 3}}, "-1 is no token id"),
        ({"logit_bias": {1: 300}}, "logit_bias of 1=300"),
        ({"n": True}, "n=True"),
        ({"max_tokens": 3}, "max_tokens: unknown; known are"),
    ],
)
def test_wrong_parameters_are_one_line(
    model: ScriptedModel, named: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says) as raised:
        model.generate_many(["a"], **named)
    assert "\n" not in str(raised.value)


def test_wrong_arguments_are_one_line(model: ScriptedModel) -> None:
    with pytest.raises(RequestError, match="put a single one into a list"):
        model.generate_many("a")
    with pytest.raises(RequestError, match="concurrency=0"):
        model.generate_many(["a"], concurrency=0)
    with pytest.raises(RequestError, match="not both"):
        model.generate_many(["a"], SamplingParams(), temperature=1)


# One answer as it comes ---------------------------------------------------------------------


def test_the_text_of_a_stream_stops_before_a_stop_string(model: ScriptedModel) -> None:
    async def read() -> list[Any]:
        stream = AsyncDistributedModelForCausalLM(model).stream("one. two", stop=". t")  # pyright: ignore[reportArgumentType] - it offers the same
        return [delta async for delta in stream]

    told = asyncio.run(read())
    assert [each.text for each in told] == ["o", "n", "e", "", "", ""]
    assert [each.finish_reason for each in told] == ["", "", "", "", "", "stop"]
    assert told[-1].usage.prompt_tokens == 8
    assert told[-1].usage.completion_tokens == 6
    assert told[0].token.logprob == -0.5
    assert model.open == 0


def test_streams_end_when_they_are_closed_or_cancelled(model: ScriptedModel) -> None:
    model.pause_s = 0.001
    model.reply = lambda *_: [65] * 900
    asynchronous = AsyncDistributedModelForCausalLM(model)  # pyright: ignore[reportArgumentType] - it offers the same

    async def read() -> list[int]:
        held = list[int]()
        stream = asynchronous.stream("a")
        assert (await anext(stream)).text == "A"
        held.append(model.open)
        await stream.aclose()
        held.append(model.open)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asynchronous.generate("a", max_new_tokens=900))
            await asyncio.to_thread(wait_until, lambda: model.open == 1)
            task.cancel()
        return [*held, model.open]

    assert asyncio.run(read()) == [1, 0, 0]


def test_a_whole_answer_and_its_usage(model: ScriptedModel) -> None:
    asynchronous = AsyncDistributedModelForCausalLM(model)  # pyright: ignore[reportArgumentType] - it offers the same
    messages = [{"role": "user", "content": "hé"}]
    found = asyncio.run(asynchronous.generate(messages, n=2, max_new_tokens=3))
    assert [choice.text for choice in found.choices] == ["hé", "Hé"]
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (3, 9)


def test_servers_hear_which_prompts_somebody_waits_for(model: ScriptedModel) -> None:
    asynchronous = AsyncDistributedModelForCausalLM(model)  # pyright: ignore[reportArgumentType] - it offers the same

    async def ask() -> None:
        await asynchronous.generate("a")
        async for _ in asynchronous.stream("a"):
            continue

    list(model.generate_many(["a", "b"]))
    asyncio.run(ask())
    assert model.in_background == [True, True, False, False]


def test_messages_that_are_none_are_one_line(model: ScriptedModel) -> None:
    wrong: list[Any] = [[{"role": "user"}], [{"role": "nobody", "content": "a"}]]
    found = [str(each.error) for each in model.generate_many(wrong)]
    assert found == [
        "messages[0]: a message has a role and a content",
        "the chat template refuses the messages: no such role",
    ]


def test_who_was_not_alone_all_the_time_tries_again() -> None:
    places = Places(2)
    places.taken = 2
    began = places.given_back
    places.ended()
    assert places.found_no_room(began)
    places.taken = 1
    assert not places.found_no_room(places.given_back)
