"""What goes wrong reaches the caller as one typed error, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from bloombee.client import AutoDistributedModelForCausalLM
from bloombee.client.batch import BatchTerms
from bloombee.core import PeerId, Span
from bloombee.errors import (
    BloomBeeError,
    DeadlineExceeded,
    KVFull,
    RequestError,
    SettingsError,
    StepFailed,
    SwarmError,
    TransportError,
    Unsupported,
)
from bloombee.models import open_source
from bloombee.swarm.records import ServerState
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bloombee.client import DistributedModelForCausalLM

IDS = torch.tensor([[5, 9, 33, 7]])
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
SPANS = (Span(0, 2), Span(2, 5))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def swarm(path: Path) -> Iterator[ClientSwarm]:
    with ClientSwarm(open_source(str(path)), SPANS, Size(kv_tokens=2048)) as swarm:
        yield swarm


@pytest.fixture
def model(swarm: ClientSwarm) -> DistributedModelForCausalLM:
    return swarm.model()


def all_free(swarm: ClientSwarm, stages: slice = slice(None)) -> bool:
    """Whether every stage has let go of everything, within a second."""
    until = time.monotonic() + 5
    chosen = swarm.stages[stages]
    while time.monotonic() < until:
        free = [swarm.loop.run(stage.executor.free_tokens()) for stage in chosen]
        if free == [swarm.size.kv_tokens] * len(chosen):
            return True
        threading.Event().wait(0.01)
    return False


# Peers that fail -------------------------------------------------------------------------


def burn(swarm: ClientSwarm, monkeypatch: pytest.MonkeyPatch, fails: range) -> list[int]:
    """Let the second stage's model raise in these of its passes; the list counts passes."""
    span_model: Any = swarm.stages[1]._parts.model
    forward, calls = span_model.forward, []

    def fail_some(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(len(calls))
        if calls[-1] in fails:
            raise RuntimeError("the device caught fire")
        return forward(*arguments, **named)

    monkeypatch.setattr(span_model, "forward", fail_some)
    return calls


def test_a_stage_that_fails_every_time_is_named(
    swarm: ClientSwarm, model: DistributedModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = burn(swarm, monkeypatch, range(2, 1000))
    with pytest.raises(StepFailed, match=r"blocks 2:5 at .*the device caught fire") as caught:
        model.generate(IDS, max_new_tokens=8, **GREEDY)
    assert "\n" not in str(caught.value)
    assert len(calls) < 12
    assert all_free(swarm)


def test_a_session_outlives_a_step_that_nobody_can_compute(
    swarm: ClientSwarm,
    model: DistributedModelForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
) -> None:
    local: Any = reference(path)
    expected = local.generate(IDS, max_new_tokens=8, **GREEDY)
    with model.inference_session(max_length=64):
        model.generate(IDS, max_new_tokens=2, **GREEDY)
        with monkeypatch.context() as patch:
            burn(swarm, patch, range(1000))
            with pytest.raises(StepFailed, match="the device caught fire"):
                model.generate(IDS, max_new_tokens=8, **GREEDY)
        assert model.generate(IDS, max_new_tokens=8, **GREEDY).tolist() == expected.tolist()
    assert all_free(swarm)


def test_blocks_that_nobody_holds_any_more_end_a_call_and_free_the_rest(
    swarm: ClientSwarm,
) -> None:
    model = swarm.model(QUICK.model_copy(update={"recovery_s": 0.5}))
    with model.inference_session(max_length=64), pytest.raises(SwarmError, match="blocks 2:5"):
        model.generate(IDS, max_new_tokens=4, **GREEDY)
        swarm.network.kill(swarm.stages[1].endpoint.peer)
        model.generate(torch.cat((IDS, IDS), 1), max_new_tokens=4, **GREEDY)
    assert all_free(swarm, slice(0, 1))


def test_a_silent_stage_meets_the_deadline(swarm: ClientSwarm) -> None:
    hasty = swarm.model(QUICK.model_copy(update={"step_s": 0.3, "close_s": 0.2}))
    with hasty.inference_session(max_length=64):
        hasty(IDS)
        peers = [stage.endpoint.peer for stage in swarm.stages]
        swarm.network.partition([peers[0]], [peers[1]])
        with pytest.raises(DeadlineExceeded, match=r"a step through .* took longer than 0.3 s"):
            hasty(IDS)
    swarm.network.heal()
    assert all_free(swarm)


def test_a_stopping_server_ends_its_sessions(
    swarm: ClientSwarm, model: DistributedModelForCausalLM
) -> None:
    with model.inference_session(max_length=64):
        model(IDS)
        swarm.loop.run(swarm.stages[1].stop(0.5))
        with pytest.raises(BloomBeeError):
            model(IDS)
    assert all_free(swarm, slice(0, 1))


def test_a_dead_server_is_passed_over(
    swarm: ClientSwarm, model: DistributedModelForCausalLM, path: Path
) -> None:
    """Its record is still there; another server of its blocks is taken."""
    record = replace(swarm.record(swarm.stages[0]), addresses=("memory:nowhere",))
    fast = {"throughput_tokens_per_s": 1e6, "peer": PeerId("0-dead")}
    swarm.extra_records.append(replace(record, **fast))
    local: Any = reference(path)
    expected = local.generate(IDS, max_new_tokens=4, **GREEDY)
    assert model.generate(IDS, max_new_tokens=4, **GREEDY).tolist() == expected.tolist()
    swarm.lost.add(PeerId(swarm.stages[0].endpoint.peer))
    with pytest.raises(TransportError, match="can't reach blocks 0:2 at 0-dead"):
        model.generate(IDS, max_new_tokens=4, **GREEDY)


def test_blocks_that_nobody_holds_are_named(
    swarm: ClientSwarm, model: DistributedModelForCausalLM
) -> None:
    swarm.lost.add(PeerId(swarm.stages[1].endpoint.peer))
    joining = replace(swarm.record(swarm.stages[1]), state=ServerState.JOINING)
    swarm.extra_records.append(replace(joining, peer=PeerId("joining1")))
    with pytest.raises(SwarmError, match=r"no server holds blocks 2:5 .*joining1 .* is joining"):
        model(IDS)


def test_an_overlapping_server_serves_a_part_of_its_span(
    swarm: ClientSwarm, model: DistributedModelForCausalLM, path: Path
) -> None:
    swarm.lost.add(PeerId(swarm.stages[1].endpoint.peer))
    swarm.add(Span(1, 5))
    local: Any = reference(path)
    expected = local.generate(IDS, max_new_tokens=6, **GREEDY)
    assert model.generate(IDS, max_new_tokens=6, **GREEDY).tolist() == expected.tolist()
    assert model.route is not None
    assert [stage.span for stage in model.route.stages] in (
        [Span(0, 1), Span(1, 5)],
        [Span(0, 2), Span(2, 5)],
    )


def test_full_servers_say_so(swarm: ClientSwarm, model: DistributedModelForCausalLM) -> None:
    with model.inference_session(max_length=1984):
        model(IDS)
        with pytest.raises(KVFull, match=r"blocks .*64.* free"):
            swarm.model().generate(IDS, max_new_tokens=100, **GREEDY)
    assert all_free(swarm)


# Requests that can't be served -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate(IDS, max_new_tokens=3000), RequestError, r"3004 tokens .*\(2048\)"),
        (lambda m: m.generate(IDS, head="tail"), RequestError, "'tail' is unknown"),
        (
            lambda m: m.generate(IDS, max_new_tokens=3, cache=DynamicCache()),
            RequestError,
            "DynamicCache",
        ),
        (
            lambda m: m.generate(IDS, max_new_tokens=3, cache_implementation="static"),
            Unsupported,
            "static",
        ),
        (lambda m: m.generate(IDS, penalty_alpha=0.6, top_k=4), Unsupported, "contrastive"),
        (
            lambda m: m.generate(IDS, max_new_tokens=3, assistant_early_exit=1),
            Unsupported,
            "early_exit",
        ),
        (
            lambda m: m.generate(IDS, max_new_tokens=3, attention_mask=IDS * 0),
            RequestError,
            "row 0 .* no unmasked",
        ),
        (lambda m: m.generate(IDS, temprature=2.0), ValueError, "temprature"),
        (lambda m: m(IDS, output_attentions=True), Unsupported, "output_attentions"),
        (lambda m: m(IDS, position_ids=IDS), RequestError, "position_ids"),
        (lambda m: m(IDS, attention_mask=IDS[:, :2]), RequestError, r"mask is \[1, 2\]"),
        (lambda m: m(IDS, token_types=IDS), RequestError, "does not take token_types"),
        (lambda m: m(), RequestError, "either input_ids or inputs_embeds"),
        (lambda m: m(IDS.float()), RequestError, "integers"),
        (lambda m: m(IDS[:, :0]), RequestError, "empty"),
        (lambda m: m(IDS + 300), RequestError, "token id 305 is outside"),
        (lambda m: m.generate(IDS - 6, max_new_tokens=2), RequestError, "token id -1 is outside"),
        (lambda m: m(inputs_embeds=torch.zeros(1, 2, 48).requires_grad_()), Unsupported, "gradie"),
        (lambda m: m.train(), Unsupported, "training"),
        (lambda m: m.resize_token_embeddings(9), Unsupported, "resizing"),
        (lambda m: m.save_pretrained("x"), Unsupported, "saving"),
        (lambda m: m.new_cache(BatchTerms(1, 9999)), RequestError, "9999 tokens"),
    ],
)
def test_what_is_refused(
    model: DistributedModelForCausalLM,
    swarm: ClientSwarm,
    call: Any,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        call(model)
    assert model.route is None, "a session was opened for what could be refused before"


def test_more_than_the_swarm_holds_is_refused_with_numbers(
    model: DistributedModelForCausalLM,
) -> None:
    with pytest.raises(RequestError, match=r"8 sequences of 504 tokens .* holds 2048 KV tokens"):
        model.generate(IDS.expand(8, -1), max_new_tokens=500, head="client", **GREEDY)


def test_sessions_refuse_what_does_not_fit_them(model: DistributedModelForCausalLM) -> None:
    with model.inference_session(max_length=16) as session:
        with pytest.raises(
            RequestError, match=r"needs a session of max_length=23, this one has 16"
        ):
            model.generate(IDS, max_new_tokens=20, **GREEDY)
        with pytest.raises(RequestError, match="1 rows, input_ids are"):
            model.generate(IDS.expand(2, -1), max_new_tokens=2, **GREEDY)
        with pytest.raises(RequestError, match="the cache holds 1 rows, this call has 3"):
            model.generate(IDS, max_new_tokens=2, num_beams=3, eos_token_id=None)
        with pytest.raises(RequestError, match="would hold 17 tokens"):
            model(torch.full((1, 17), 5))
        with pytest.raises(RequestError, match="position 1: the session holds 0"):
            session.position = 1
        model(IDS)
        with pytest.raises(RequestError, match="mask differs"):
            model(IDS, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]]))
        assert session.position == 4
    with pytest.raises(RequestError, match="closed"):
        model(IDS, cache=session.cache)


def test_from_pretrained_refuses_what_it_cannot_start() -> None:
    with pytest.raises(SettingsError, match="initial_peers"):
        AutoDistributedModelForCausalLM.from_pretrained("smollm2")
    with pytest.raises(SettingsError, match="from_pretrained"):
        AutoDistributedModelForCausalLM()


# Ends ---------------------------------------------------------------------------------------------


def test_ctrl_c_frees_the_servers(
    swarm: ClientSwarm, model: DistributedModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(IDS, max_new_tokens=2000, **GREEDY)
    assert all_free(swarm)
    assert model.generate(IDS, max_new_tokens=2, **GREEDY).shape == (1, 6)


def test_a_dropped_cache_frees_the_servers(
    swarm: ClientSwarm, model: DistributedModelForCausalLM
) -> None:
    output: Any = model(IDS, use_cache=True)
    assert output.cache.get_seq_length() == 4
    assert swarm.free_tokens() != [2048, 2048]
    del output
    gc.collect()
    assert all_free(swarm)


def test_a_dropped_model_leaves_the_swarm(swarm: ClientSwarm) -> None:
    left = threading.Event()
    model = swarm.model()
    leave = model._access.close

    async def close() -> None:
        await leave()
        left.set()

    model._access.close = close
    model.generate(IDS, max_new_tokens=2, **GREEDY)
    swarm.forget(model)
    del model
    gc.collect()
    assert left.wait(5)


def test_a_closed_model_says_so(model: DistributedModelForCausalLM) -> None:
    model.generate(IDS, max_new_tokens=2, **GREEDY)
    model.close()
    for call in (model, lambda ids: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(RequestError, match="the model is closed"):
            call(IDS)


def test_it_works_in_a_running_loop(model: DistributedModelForCausalLM) -> None:
    async def cell() -> torch.Tensor:
        return model.generate(IDS, max_new_tokens=3, **GREEDY)

    assert asyncio.run(cell()).shape == (1, 7)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seed": 1.5}, "seed=1.5: give an integer"),
        ({"seed": 2**70}, "give an integer"),
        ({"deadline_s": "x"}, "deadline_s='x': give a positive number"),
        ({"deadline_s": float("inf")}, "give a positive number"),
        ({"deadline_s": True}, "give a positive number"),
    ],
)
def test_arguments_of_the_wrong_kind(
    model: DistributedModelForCausalLM, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        model.generate(IDS, max_new_tokens=1, **GREEDY, **arguments)


def test_sessions_of_the_wrong_size(model: DistributedModelForCausalLM) -> None:
    for wrong in (0, -1, 1.5, True, "x"):
        with (
            pytest.raises(RequestError, match="max_length=.*: give a positive integer"),
            model.inference_session(max_length=wrong),  # pyright: ignore[reportArgumentType] - the point
        ):
            pass
    with (
        model.inference_session(max_length=8) as session,
        pytest.raises(RequestError, match=r"position 1\.5: the session holds"),
    ):
        session.position = 1.5  # pyright: ignore[reportAttributeAccessIssue] - the point


def test_a_time_that_is_up_before_it_begins_is_named(model: DistributedModelForCausalLM) -> None:
    with pytest.raises(DeadlineExceeded, match="the call took longer than the 1e-06 s"):
        model.generate(IDS, max_new_tokens=1, deadline_s=1e-6, **GREEDY)
    with model.inference_session(max_length=16):
        model.generate(IDS, max_new_tokens=2, **GREEDY)
        with pytest.raises(DeadlineExceeded, match="longer than the 1e-06 s"):
            model.generate(IDS, max_new_tokens=2, deadline_s=1e-6, **GREEDY)
        assert model.generate(IDS, max_new_tokens=3, **GREEDY).shape == (1, 7)
