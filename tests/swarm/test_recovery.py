"""Servers die, freeze, restart and leave under a running `generate`: its tokens stay the same."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import set_seed

from bloombee.core import PeerId, Span
from bloombee.errors import DeadlineExceeded, SwarmError
from bloombee.models import open_source
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.generation import mixed, prompt
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.models import ModelSource
    from bloombee.server.stage import StageServer

THREE = (Span(0, 2), Span(2, 4), Span(4, 5))
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = prompt(1, 9)
NEW = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def local(path: Path) -> Any:
    return reference(path)


@pytest.fixture(scope="module")
def source(path: Path) -> ModelSource:
    return open_source(str(path))


@pytest.fixture
def swarm(source: ModelSource) -> Iterator[ClientSwarm]:
    """Three stages; `spares` adds others."""
    with ClientSwarm(source, THREE, Size(kv_tokens=4096)) as swarm:
        yield swarm


def spares(swarm: ClientSwarm, *spans: Span) -> list[StageServer]:
    return [swarm.add(span) for span in spans or THREE]


def all_free(swarm: ClientSwarm) -> None:
    """Nothing is held on any stage that lives, within a moment."""
    until, alive = time.monotonic() + 5, swarm.alive()
    while True:
        free = [swarm.loop.run(stage.executor.free_tokens()) for stage in alive]
        if free == [swarm.size.kv_tokens] * len(alive):
            return
        assert time.monotonic() < until, free
        threading.Event().wait(0.02)


def same(
    local: Any, model: DistributedModelForCausalLM, ids: torch.Tensor = IDS, **more: Any
) -> None:
    arguments = {**GREEDY, "max_new_tokens": NEW, **more}
    expected = local.generate(ids, **arguments)
    assert model.generate(ids, **arguments).tolist() == expected.tolist()


def _peer(stage: StageServer) -> PeerId:
    return PeerId(stage.endpoint.peer)


def recoveries(model: DistributedModelForCausalLM) -> int:
    assert model.traffic is not None
    return len(model.traffic.recoveries)


# Every stage, at every time, in every way ----------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("number", [0, 5], ids=["prefill", "decode"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_is_lost(
    swarm: ClientSwarm, local: Any, index: int, number: int, how: str
) -> None:
    doomed = swarm.stages[index]
    strike = swarm.kill if how == "kill" else swarm.freeze
    swarm.at_pass(doomed, number, lambda: strike(doomed))
    model = swarm.model()
    spare = swarm.add(THREE[index])
    _favour(swarm, doomed)
    same(local, model)
    assert recoveries(model) == 1
    assert swarm.serving(model, index) is spare
    assert model.traffic is not None
    assert model.traffic.replayed_tokens <= len(IDS[0]) + NEW
    if how == "kill":
        all_free(swarm)


# Every kind of generation ------------------------------------------------------------------------

MIXED_IDS, MIXED_MASK = mixed([3, 9, 6], "left")
KINDS: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "greedy": (IDS, {}),
    "batch": (MIXED_IDS, {"attention_mask": MIXED_MASK}),
    "beams": (prompt(2, 7), {"num_beams": 3}),
    "several": (IDS, {"num_beams": 4, "num_return_sequences": 2}),
    "lookup": (IDS.repeat(1, 3), {"prompt_lookup_num_tokens": 3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_stages_are_lost_one_after_the_other(swarm: ClientSwarm, local: Any, kind: str) -> None:
    ids, arguments = KINDS[kind]
    spares(swarm)
    model = swarm.model()
    model.generate(IDS, max_new_tokens=1, **GREEDY)
    for index, number in enumerate((2, 4, 6)):
        doomed = swarm.serving(model, index)
        swarm.at_pass(doomed, number, _killer(swarm, doomed))
        _favour(swarm, doomed)
    same(local, model, ids, **arguments)
    assert recoveries(model) >= 3
    all_free(swarm)


def _killer(swarm: ClientSwarm, doomed: StageServer) -> Callable[[], None]:
    return lambda: swarm.kill(doomed)


def _favour(swarm: ClientSwarm, stage: StageServer) -> None:
    """Let routing prefer this stage over its spare."""
    swarm.speeds[stage.endpoint.peer] = 1e6


def test_sampling_draws_what_it_would_have_drawn(swarm: ClientSwarm, local: Any) -> None:
    spares(swarm)
    model = swarm.model()
    model.generate(IDS, max_new_tokens=1, **GREEDY)
    arguments = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 20}
    set_seed(7)
    expected = local.generate(IDS, **arguments)
    doomed = swarm.serving(model, 1)
    _favour(swarm, doomed)
    swarm.at_pass(doomed, 8, lambda: swarm.kill(doomed))
    assert model.generate(IDS, seed=7, **arguments).tolist() == expected.tolist()
    assert recoveries(model) == 1


def test_embeddings_are_kept_for_the_first_stage(swarm: ClientSwarm, local: Any) -> None:
    spares(swarm)
    model = swarm.model()
    embeds = local.get_input_embeddings()(IDS).detach()
    expected = local.generate(inputs_embeds=embeds, max_new_tokens=NEW, **GREEDY)
    _favour(swarm, swarm.stages[0])
    swarm.at_pass(swarm.stages[0], 5, lambda: swarm.kill(swarm.stages[0]))
    found: Any = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, **GREEDY)
    assert found.tolist() == expected.tolist()
    assert recoveries(model) == 1


def test_several_turns(swarm: ClientSwarm, local: Any) -> None:
    spares(swarm)
    model = swarm.model()
    with model.inference_session(max_length=80):
        text = IDS
        for turn in range(4):
            expected = local.generate(text, max_new_tokens=6, **GREEDY)
            found: Any = model.generate(text, max_new_tokens=6, **GREEDY)
            assert found.tolist() == expected.tolist()
            doomed = swarm.serving(model, turn % 3)
            if turn % 2:  # while it runs, or between two turns
                swarm.at_pass(doomed, 3, _killer(swarm, doomed))
            elif turn == 0:
                swarm.now(lambda: swarm.kill(swarm.serving(model, 0)))
            text = torch.cat((found[:, :-2], prompt(1, 4, turn)), 1)
        assert recoveries(model) == 2
    all_free(swarm)


def test_a_long_prompt_that_travels_in_parts(swarm: ClientSwarm, local: Any) -> None:
    spares(swarm)
    model = swarm.model()
    _favour(swarm, swarm.stages[1])
    swarm.at_pass(swarm.stages[1], 3, lambda: swarm.kill(swarm.stages[1]))
    same(local, model, prompt(1, 600), max_new_tokens=4)
    assert recoveries(model) == 1
    all_free(swarm)


# Several at once, again and again -------------------------------------------------------------


@pytest.mark.parametrize("gone", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_several_at_once(swarm: ClientSwarm, local: Any, gone: tuple[int, ...]) -> None:
    for index in gone:
        _favour(swarm, swarm.stages[index])
    spares(swarm)

    def strike() -> None:
        for index in gone:
            swarm.kill(swarm.stages[index])

    swarm.at_pass(swarm.stages[gone[-1]], 5, strike)
    model = swarm.model()
    same(local, model)
    assert recoveries(model) >= 1
    all_free(swarm)


def test_whoever_takes_over_is_lost_while_it_computes_the_past(
    swarm: ClientSwarm, local: Any
) -> None:
    first = swarm.stages[1]
    _favour(swarm, first)
    for _ in range(3):
        heir = swarm.add(THREE[1])
        swarm.at_pass(heir, 0, _killer(swarm, heir))
    last = swarm.add(THREE[1])
    swarm.speeds[last.endpoint.peer] = 0.01
    swarm.at_pass(first, 5, lambda: swarm.kill(first))
    model = swarm.model()
    same(local, model)
    assert swarm.serving(model, 1) is last
    all_free(swarm)


def test_others_with_other_cuts_take_over(swarm: ClientSwarm, local: Any) -> None:
    doomed = swarm.stages[1]
    swarm.at_pass(doomed, 5, lambda: swarm.kill(doomed))
    model = swarm.model()
    spares(swarm, Span(1, 3), Span(3, 5))
    _favour(swarm, doomed)
    swarm.lost.update(_peer(stage) for stage in swarm.stages[3:])
    swarm.at_pass(doomed, 5, lambda: swarm.lost.clear())
    same(local, model)
    assert model.route is not None
    assert [str(stage.span) for stage in model.route.stages] == ["0:2", "2:3", "3:4", "4:5"]
    all_free(swarm)


def test_a_server_that_serves_a_neighbour_takes_both(swarm: ClientSwarm, local: Any) -> None:
    """Nobody else has the lost blocks, but one who serves others of this session has them too."""
    doomed = swarm.stages[0]
    swarm.lost.add(_peer(swarm.stages[1]))
    whole = swarm.add(Span(0, 4))
    swarm.speeds[_peer(whole)] = 0.01
    swarm.at_pass(doomed, 5, lambda: swarm.kill(doomed))
    _favour(swarm, doomed)
    model = swarm.model()
    with model.inference_session(max_length=80):
        swarm.lost.add(_peer(whole))
        swarm.lost.discard(_peer(swarm.stages[1]))
        model(IDS[:, :1])
        swarm.lost.discard(_peer(whole))
        same(local, model)
    assert recoveries(model) == 1


# No holder --------------------------------------------------------------------------------


def test_a_server_that_joins_late_is_waited_for(
    swarm: ClientSwarm, local: Any, caplog: pytest.LogCaptureFixture
) -> None:
    doomed = swarm.stages[1]
    swarm.at_pass(doomed, 5, lambda: swarm.kill(doomed))
    model = swarm.model()
    joining = threading.Timer(1.0, lambda: swarm.add(THREE[1]))
    joining.start()
    same(local, model)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no server holds blocks 2:4" in warnings[0]
    all_free(swarm)


def test_the_session_goes_on_when_coverage_returns(swarm: ClientSwarm, local: Any) -> None:
    model = swarm.model(QUICK.model_copy(update={"recovery_s": 1.5}))
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        swarm.now(lambda: swarm.kill(swarm.stages[1]))
        begun = time.monotonic()
        with pytest.raises(SwarmError, match=r"blocks 2:4") as caught:
            model.generate(IDS, max_new_tokens=NEW, **GREEDY)
        assert "\n" not in str(caught.value)
        assert time.monotonic() - begun < 6
        swarm.restart(swarm.stages[1])
        same(local, model)
    all_free(swarm)


def test_a_server_that_comes_back_with_nothing_is_filled_again(
    swarm: ClientSwarm, local: Any
) -> None:
    model = swarm.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        swarm.now(lambda: swarm.kill(swarm.stages[2]))
        swarm.restart(swarm.stages[2])
        same(local, model)
        assert model.traffic is not None
        assert 0 < model.traffic.replayed_tokens <= 2 * (len(IDS[0]) + NEW)
    all_free(swarm)


def test_a_deadline_ends_the_call_and_not_the_session(swarm: ClientSwarm, local: Any) -> None:
    model = swarm.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        swarm.now(lambda: swarm.freeze(swarm.stages[1]))
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            model.generate(IDS, max_new_tokens=NEW, deadline_s=0.4, **GREEDY)
        assert time.monotonic() - begun < 2
        swarm.now(swarm.network.heal)
        same(local, model)
        assert model.traffic is not None
        assert not model.traffic.replayed_tokens
    all_free(swarm)


# Nothing was lost -------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stream_that_ends_costs_nothing_but_a_new_one(
    swarm: ClientSwarm, local: Any, index: int
) -> None:
    model = swarm.model()
    spares(swarm)
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        before = model.route
        stage = swarm.serving(model, index)
        client = swarm.clients[0]

        async def end() -> None:
            for stream in swarm.network.streams_between(stage.endpoint.peer, client):
                await stream.close()

        swarm.loop.run(end())
        same(local, model)
        assert model.route == before
        assert model.traffic is not None
        assert not model.traffic.replayed_tokens
    all_free(swarm)


def test_a_client_that_was_cut_off_goes_on_without_replay(swarm: ClientSwarm, local: Any) -> None:
    model = swarm.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        peers = [stage.endpoint.peer for stage in swarm.stages]
        swarm.now(lambda: swarm.network.partition([swarm.clients[0]], peers))
        mending = threading.Timer(2.5, lambda: swarm.now(swarm.network.heal))
        mending.start()
        same(local, model)
        assert model.traffic is not None
        assert not model.traffic.replayed_tokens
    all_free(swarm)


def test_the_next_session_knows_who_failed(swarm: ClientSwarm, local: Any) -> None:
    """The dead server's record is still there; nobody dials it again."""
    spares(swarm, THREE[1])
    doomed = swarm.stages[1]
    _favour(swarm, doomed)
    swarm.at_pass(doomed, 5, lambda: swarm.freeze(doomed))
    model = swarm.model(QUICK.model_copy(update={"backoff_s": 20.0}))
    same(local, model)
    begun = time.monotonic()
    same(local, model)
    assert time.monotonic() - begun < 1
    assert recoveries(model) == 0
