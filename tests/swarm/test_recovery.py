"""Servers die, freeze, restart and leave under a running `generate`: its tokens stay the same."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.client.seeded_draws import SeededDraws
from bloombee.core import Span
from bloombee.errors import DeadlineExceeded, SwarmError
from tests.client_swarm import QUICK, Size
from tests.generation import mixed, prompt
from tests.swarm.disturbed import (
    GREEDY,
    IDS,
    NEW,
    THREE,
    all_free,
    favour,
    killer,
    peer_of,
    recoveries,
    same,
    spares,
)

if TYPE_CHECKING:
    from tests.client_swarm import ClientSwarm

# Every stage, at every time, in every way ----------------------------------------------------


@pytest.mark.parametrize(("how", "head"), [("kill", "client"), ("kill", "server"), ("freeze", "")])
@pytest.mark.parametrize("number", [0, 5], ids=["prefill", "decode"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_is_lost(
    three: ClientSwarm, local: Any, index: int, number: int, how: str, head: str
) -> None:
    doomed = three.stages[index]
    strike = three.kill if how == "kill" else three.freeze
    three.at_pass(doomed, number, lambda: strike(doomed))
    model = three.model()
    spare = three.add(THREE[index])
    favour(three, doomed)
    same(local, model, head=head or "auto")
    assert recoveries(model) == 1
    assert three.serving(model, index) is spare
    assert model.traffic is not None
    assert model.traffic.replayed_tokens <= len(IDS[0]) + NEW
    if how == "kill":
        all_free(three)


# Every kind of generation ------------------------------------------------------------------------

MIXED_IDS, MIXED_MASK = mixed([3, 9, 6], "left")
KINDS: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "greedy": (IDS, {}),
    "client": (IDS, {"head": "client"}),
    "batch": (MIXED_IDS, {"attention_mask": MIXED_MASK}),
    "beams": (prompt(2, 7), {"num_beams": 3}),
    "several": (IDS, {"num_beams": 4, "num_return_sequences": 2}),
    "lookup": (IDS.repeat(1, 3), {"prompt_lookup_num_tokens": 3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_stages_are_lost_one_after_the_other(three: ClientSwarm, local: Any, kind: str) -> None:
    ids, arguments = KINDS[kind]
    spares(three)
    model = three.model()
    model.generate(IDS, max_new_tokens=1, **GREEDY)
    for index, number in enumerate((2, 4, 6)):
        doomed = three.serving(model, index)
        three.at_pass(doomed, number, killer(three, doomed))
        favour(three, doomed)
    same(local, model, ids, **arguments)
    assert recoveries(model) >= 3
    all_free(three)


def test_sampling_draws_what_it_would_have_drawn(three: ClientSwarm, local: Any) -> None:
    spares(three)
    model = three.model()
    model.generate(IDS, max_new_tokens=1, **GREEDY)
    arguments = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 20}
    with SeededDraws(7):
        expected = local.generate(IDS, **arguments)
    doomed = three.serving(model, 1)
    favour(three, doomed)
    three.at_pass(doomed, 8, lambda: three.kill(doomed))
    assert model.generate(IDS, seed=7, **arguments).tolist() == expected.tolist()
    assert recoveries(model) == 1


def test_embeddings_are_kept_for_the_first_stage(three: ClientSwarm, local: Any) -> None:
    spares(three)
    model = three.model()
    embeds = local.get_input_embeddings()(IDS).detach()
    expected = local.generate(inputs_embeds=embeds, max_new_tokens=NEW, **GREEDY)
    favour(three, three.stages[0])
    three.at_pass(three.stages[0], 5, lambda: three.kill(three.stages[0]))
    found: Any = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, **GREEDY)
    assert found.tolist() == expected.tolist()
    assert recoveries(model) == 1


def test_several_turns(three: ClientSwarm, local: Any) -> None:
    spares(three)
    model = three.model()
    with model.inference_session(max_length=80):
        text = IDS
        for turn in range(4):
            expected = local.generate(text, max_new_tokens=6, **GREEDY)
            found: Any = model.generate(text, max_new_tokens=6, **GREEDY)
            assert found.tolist() == expected.tolist()
            doomed = three.serving(model, turn % 3)
            if turn % 2:  # while it runs, or between two turns
                three.at_pass(doomed, 3, killer(three, doomed))
            elif turn == 0:
                three.now(lambda: three.kill(three.serving(model, 0)))
            text = torch.cat((found[:, :-2], prompt(1, 4, turn)), 1)
        assert recoveries(model) == 2
    all_free(three)


def test_a_long_prompt_that_travels_in_parts(three: ClientSwarm, local: Any) -> None:
    spares(three)
    model = three.model()
    favour(three, three.stages[1])
    three.at_pass(three.stages[1], 3, lambda: three.kill(three.stages[1]))
    same(local, model, prompt(1, 600), max_new_tokens=4)
    assert recoveries(model) == 1
    all_free(three)


def test_a_stage_that_sits_on_a_step(three: ClientSwarm, local: Any) -> None:
    slow = three.stages[1]
    favour(three, slow)
    spares(three, THREE[1])
    woken = threading.Event()
    model: Any = slow._parts.model
    forward, passes = model.forward, itertools.count()

    def sleepy(*arguments: Any, **named: Any) -> torch.Tensor:
        if next(passes) == 4:
            woken.wait(30)
        return forward(*arguments, **named)

    model.forward = sleepy
    remote = three.model(QUICK.model_copy(update={"stage_s": 0.5, "open_s": 1.0}))
    try:
        same(local, remote)
        assert three.serving(remote, 1) is not slow
    finally:
        woken.set()


def test_a_server_of_smaller_steps_is_no_use_to_a_prompt_under_way(
    three: ClientSwarm, local: Any
) -> None:
    doomed = three.stages[1]
    favour(three, doomed)
    three.at_pass(doomed, 1, killer(three, doomed))
    spares(three, THREE[1])
    three.size = Size(kv_tokens=4096, max_step_tokens=16)
    favour(three, spares(three, THREE[1])[0], 1000.0)
    model = three.model()
    same(local, model, prompt(1, 300), max_new_tokens=4)
    assert recoveries(model) == 1


# Several at once, again and again -------------------------------------------------------------


@pytest.mark.parametrize("gone", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_several_at_once(three: ClientSwarm, local: Any, gone: tuple[int, ...]) -> None:
    for index in gone:
        favour(three, three.stages[index])
    spares(three)

    def strike() -> None:
        for index in gone:
            three.kill(three.stages[index])

    three.at_pass(three.stages[gone[-1]], 5, strike)
    model = three.model()
    same(local, model)
    assert recoveries(model) >= 1
    all_free(three)


def test_whoever_takes_over_is_lost_while_it_computes_the_past(
    three: ClientSwarm, local: Any
) -> None:
    first = three.stages[1]
    favour(three, first)
    for _ in range(3):
        heir = three.add(THREE[1])
        three.at_pass(heir, 0, killer(three, heir))
    last = three.add(THREE[1])
    three.speeds[last.endpoint.peer] = 0.01
    three.at_pass(first, 5, lambda: three.kill(first))
    model = three.model()
    same(local, model)
    assert three.serving(model, 1) is last
    all_free(three)


def test_others_with_other_cuts_take_over(three: ClientSwarm, local: Any) -> None:
    doomed = three.stages[1]
    three.at_pass(doomed, 5, lambda: three.kill(doomed))
    model = three.model()
    spares(three, Span(1, 3), Span(3, 5))
    favour(three, doomed)
    three.lost.update(peer_of(stage) for stage in three.stages[3:])
    three.at_pass(doomed, 5, lambda: three.lost.clear())
    same(local, model)
    assert model.route is not None
    assert [str(stage.span) for stage in model.route.stages] == ["0:2", "2:3", "3:4", "4:5"]
    all_free(three)


# No holder --------------------------------------------------------------------------------


def test_a_server_that_joins_late_is_waited_for(
    three: ClientSwarm, local: Any, caplog: pytest.LogCaptureFixture
) -> None:
    doomed = three.stages[1]
    three.at_pass(doomed, 5, lambda: three.kill(doomed))
    model = three.model()
    joining = threading.Timer(1.0, lambda: three.add(THREE[1]))
    joining.start()
    same(local, model)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no server holds blocks 2:4" in warnings[0]
    all_free(three)


def test_the_session_goes_on_when_coverage_returns(three: ClientSwarm, local: Any) -> None:
    model = three.model(QUICK.model_copy(update={"recovery_s": 1.5}))
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        three.now(lambda: three.kill(three.stages[1]))
        begun = time.monotonic()
        with pytest.raises(SwarmError, match=r"blocks 2:4") as caught:
            model.generate(IDS, max_new_tokens=NEW, **GREEDY)
        assert "\n" not in str(caught.value)
        assert time.monotonic() - begun < 6
        three.restart(three.stages[1])
        same(local, model)
    all_free(three)


def test_a_call_waits_no_longer_for_what_was_tried_before_it(
    three: ClientSwarm, local: Any
) -> None:
    """The session recovers by itself, in vain; a call that comes meanwhile shares its time."""
    spare, freed = three.add(THREE[1]), threading.Event()
    forward = spare._parts.model.forward

    def stuck(*arguments: Any, **named: Any) -> torch.Tensor:
        freed.wait(20)
        return forward(*arguments, **named)

    spare._parts.model.forward = stuck
    favour(three, three.stages[1])
    model = three.model(QUICK.model_copy(update={"recovery_s": 3.0}))
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        three.now(lambda: three.kill(three.stages[1]))
        threading.Event().wait(1.0)
        begun = time.monotonic()
        with pytest.raises(SwarmError, match=r"could not be replaced in 3\.\d s"):
            model.generate(IDS, max_new_tokens=NEW, **GREEDY)
        assert time.monotonic() - begun == pytest.approx(3.0, abs=0.5)
        freed.set()
        same(local, model)


def test_a_server_that_comes_back_with_nothing_is_filled_again(
    three: ClientSwarm, local: Any
) -> None:
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        three.now(lambda: three.kill(three.stages[2]))
        three.restart(three.stages[2])
        same(local, model)
        assert model.traffic is not None
        assert 0 < model.traffic.replayed_tokens <= 2 * (len(IDS[0]) + NEW)
    all_free(three)


@pytest.mark.parametrize("back", [Span(2, 3), Span(3, 4), Span(0, 2)])
def test_a_server_that_comes_back_with_other_blocks(
    three: ClientSwarm, local: Any, back: Span
) -> None:
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        three.now(lambda: three.kill(three.stages[1]))
        three.restart(three.stages[1], back)
        for missing in {Span(2, 3): [Span(3, 4)], Span(3, 4): [Span(2, 3)]}.get(back, [Span(2, 4)]):
            three.add(missing)
        same(local, model)
    all_free(three)


def test_a_deadline_ends_the_call_and_not_the_session(three: ClientSwarm, local: Any) -> None:
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        three.now(lambda: three.freeze(three.stages[1]))
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            model.generate(IDS, max_new_tokens=NEW, deadline_s=0.4, **GREEDY)
        assert time.monotonic() - begun < 2
        three.now(three.network.heal)
        same(local, model)
        assert model.traffic is not None
        assert not model.traffic.replayed_tokens
    all_free(three)


# Nothing was lost -------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stream_that_ends_costs_nothing_but_a_new_one(
    three: ClientSwarm, local: Any, index: int
) -> None:
    model = three.model()
    spares(three)
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        before = model.route
        stage = three.serving(model, index)
        client = three.clients[0]

        async def end() -> None:
            for stream in three.network.streams_between(stage.endpoint.peer, client):
                await stream.close()

        three.loop.run(end())
        same(local, model)
        assert model.route == before
        assert model.traffic is not None
        assert not model.traffic.replayed_tokens
    all_free(three)


def test_a_client_that_was_cut_off_goes_on_without_replay(three: ClientSwarm, local: Any) -> None:
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        peers = [stage.endpoint.peer for stage in three.stages]
        three.now(lambda: three.network.partition([three.clients[0]], peers))
        mending = threading.Timer(2.5, lambda: three.now(three.network.heal))
        mending.start()
        same(local, model)
        assert model.traffic is not None
        assert not model.traffic.replayed_tokens
    all_free(three)


def test_the_next_session_knows_who_failed(three: ClientSwarm, local: Any) -> None:
    """The dead server's record is still there; nobody dials it again."""
    spares(three, THREE[1])
    doomed = three.stages[1]
    favour(three, doomed)
    three.at_pass(doomed, 5, lambda: three.freeze(doomed))
    model = three.model(QUICK.model_copy(update={"backoff_s": 20.0}))
    same(local, model)
    begun = time.monotonic()
    same(local, model)
    assert time.monotonic() - begun < 4, "dialing the frozen one takes longer"
    assert recoveries(model) == 0
