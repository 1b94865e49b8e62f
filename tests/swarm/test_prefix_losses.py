"""Kept prompts where stages are lost, room is short, or what comes is not what was announced."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.client.session import RemoteSession
from bloombee.client.work import Work
from bloombee.core import PackedTable
from bloombee.errors import DeadlineExceeded, RequestError
from tests.client_swarm import ClientSwarm, Size
from tests.generation import prompt
from tests.swarm.beginning import LONG, C, adopted, begins, forget, kept, longer
from tests.swarm.disturbed import GREEDY, THREE, all_free, favour, recoveries, same, spares

if TYPE_CHECKING:
    from bloombee.models import ModelSource


# Losses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 4], ids=["prompt", "decode"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_is_lost_after_it_began_with_it(
    three: ClientSwarm, local: Any, warm: Any, index: int, number: int
) -> None:
    """The stage before it has the rows of what was adopted in its journal."""
    doomed = three.stages[index]
    favour(three, doomed)
    spare = three.add(THREE[index])
    three.at_pass(doomed, number, lambda: three.kill(doomed))
    same(local, warm, begins(LONG, seed=1))
    assert adopted(warm) == [LONG]
    assert recoveries(warm) == 1
    assert three.serving(warm, index) is spare
    all_free(three)
    same(local, warm, begins(LONG, seed=2))
    assert adopted(warm) == [0]  # the spare has seen no prompt from its beginning
    kept(three, 3, 3, 3)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_is_lost_where_others_held_more_than_all(
    three: ClientSwarm, local: Any, warm: Any, lost: int
) -> None:
    forget(three, three.stages[2], 2)
    doomed = three.stages[lost]
    for stage in three.stages:
        favour(three, stage)
    spares(three)
    three.at_pass(doomed, 0, lambda: three.kill(doomed))
    same(local, warm, begins(LONG, seed=1))
    assert adopted(warm) == [C]
    assert recoveries(warm) == 1
    all_free(three)


def test_all_stages_are_lost(three: ClientSwarm, local: Any, warm: Any) -> None:
    for stage in three.stages:
        favour(three, stage)
    doomed = list(three.stages)
    spares(three)

    def strike() -> None:
        for stage in doomed:
            three.kill(stage)

    three.at_pass(doomed[1], 3, strike)
    same(local, warm, begins(LONG, seed=1))
    assert adopted(warm) == [LONG]
    assert recoveries(warm) >= 1
    all_free(three)


def test_a_stage_is_lost_before_the_first_step(
    three: ClientSwarm, local: Any, warm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = three.stages[1]
    favour(three, doomed)
    three.add(THREE[1])
    decode = RemoteSession.decode

    async def killing(self: RemoteSession, *arguments: Any, **named: Any) -> None:
        if not self.entered:
            three.kill(doomed)
            await self._circuit.alarm.wait()
        await decode(self, *arguments, **named)

    monkeypatch.setattr(RemoteSession, "decode", killing)
    same(local, warm, begins(LONG, seed=1))
    assert adopted(warm) == [0]
    assert recoveries(warm) == 1
    all_free(three)


def test_a_session_that_moves_takes_it_along(three: ClientSwarm, local: Any, warm: Any) -> None:
    leaving = three.stages[1]
    favour(three, leaving)
    heir = three.add(THREE[1])
    with warm.inference_session(max_length=400):
        ids = begins(LONG, seed=1)
        same(local, warm, ids)
        assert adopted(warm) == [LONG]
        three.lost.add(leaving.endpoint.peer)  # pyright: ignore[reportArgumentType] - a peer id
        three.loop.run(leaving.drain(5.0))
        text = longer(local, ids, prompt(1, 3))
        same(local, warm, text)
        assert three.serving(warm, 1) is heir
    assert heir.telemetry.counter("fetched_sessions").value == 1
    assert warm.traffic.replayed_tokens == 0


# Little room ------------------------------------------------------------------------------------


def test_chunks_come_and_go_within_their_room(source: ModelSource, local: Any) -> None:
    """Room for three chunks of the largest stage; three clients at once, prompts of up to three."""
    token_bytes = 2 * (2 * 2 * 8 * 4) + 48 * 4
    room = 3 * C * token_bytes + 1000
    prompts = [begins(count, seed=seed) for seed in range(2) for count in (C, 2 * C, LONG)]
    expected = [local.generate(ids, max_new_tokens=3, **GREEDY).tolist() for ids in prompts]
    with ClientSwarm(source, THREE, Size(kv_tokens=8192, prefix_bytes=room)) as swarm:
        models = [swarm.model() for _ in range(3)]
        order = itertools.islice(itertools.cycle(range(len(prompts))), 15)

        def ask(job: tuple[int, int]) -> None:
            number, index = job
            found = models[number % 3].generate(prompts[index], max_new_tokens=3, **GREEDY)
            assert found.tolist() == expected[index]
            for stage in swarm.stages:
                assert stage.prefixes.store.held_bytes <= room

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(ask, enumerate(order)))
        all_free(swarm)
        stores = [stage.prefixes.store for stage in swarm.stages]
        for store in stores:
            swarm.now(store.check)
            assert not any(chunk.uses for chunk in store._chunks.values())
        assert all(store.dropped for store in stores[:2])


def test_a_session_that_began_with_it_does_not_need_it_any_more(
    three: ClientSwarm, local: Any, warm: Any
) -> None:
    for stage in three.stages:
        favour(three, stage)
    spares(three)
    with warm.inference_session(max_length=400):
        ids = begins(LONG, seed=1)
        same(local, warm, ids)
        assert adopted(warm) == [LONG]
        for stage in three.stages[:3]:
            forget(three, stage, 3)
        doomed = three.serving(warm, 1)
        three.now(lambda: three.kill(doomed))
        text = longer(local, ids, prompt(1, 3))
        same(local, warm, text)
        assert recoveries(warm) == 1


# What was announced and what comes --------------------------------------------------------------


def test_another_prompt_than_the_session_was_opened_for(
    three: ClientSwarm, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step that never was: the next one brings other tokens, and stages must know."""
    model = three.model()
    decode = RemoteSession.decode
    calls = itertools.count()

    async def failing(self: RemoteSession, *arguments: Any, **named: Any) -> None:
        if next(calls) == 0:
            raise RequestError("not this time")
        await decode(self, *arguments, **named)

    monkeypatch.setattr(RemoteSession, "decode", failing)
    with model.inference_session(max_length=400):
        with pytest.raises(RequestError, match="not this time"):
            model.generate(begins(LONG), max_new_tokens=1, **GREEDY)
        other = prompt(1, LONG + 7, 9)
        same(local, model, other)
    kept(three, 3, 3, 3)
    same(local, model, begins(LONG))
    assert adopted(model) == [0]
    all_free(three)


@pytest.mark.parametrize("number", [0, 2], ids=["prompt", "later"])
@pytest.mark.parametrize("count", [C, LONG])
def test_a_prompt_that_is_given_up_and_another_after_it(
    three: ClientSwarm, local: Any, warm: Any, count: int, number: int
) -> None:
    """Where it had come to on each stage doesn't matter: nothing of the other is taken for it."""
    other = torch.cat((prompt(1, LONG + 7, 9), prompt(1, 200, 10)), 1)
    with warm.inference_session(max_length=800) as session:
        slow: Any = three.stages[1]._parts.model
        forward, passes = slow.forward, itertools.count()

        def late(*arguments: Any, **named: Any) -> torch.Tensor:
            if next(passes) == number:
                threading.Event().wait(0.7)
            return forward(*arguments, **named)

        slow.forward = late
        with pytest.raises(DeadlineExceeded):
            warm.generate(begins(count, more=300), max_new_tokens=4, deadline_s=0.5, **GREEDY)
        slow.forward = forward
        session.position = 0
        same(local, warm, other)
    for again in (begins(count, more=300), begins(LONG, seed=3), other):
        same(local, warm, again, max_new_tokens=4)
    all_free(three)


def test_a_first_step_that_brings_another_prompt_is_refused(three: ClientSwarm) -> None:
    model = three.model()
    prompts = (tuple(begins(C)[0].tolist()),)
    session = three.loop.run(model._opening(1, 100, prompts))
    work = Work(table=PackedTable((0,), (0,), (C + 7,)), entries=[5] * (C + 7), phase="prefill")
    with pytest.raises(RequestError, match="opened for another prompt"):
        three.loop.run(session.step(work))
    assert session.entered == 0
    three.loop.run(session.close())
    all_free(three)
