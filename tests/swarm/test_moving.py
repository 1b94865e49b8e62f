"""Sessions that move while they are used: servers leave, sessions grow, calls are cut short."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.client.batch import BatchTerms
from bloombee.core import Span
from bloombee.errors import KVFull, SwarmError
from bloombee.models import open_source
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.generation import prompt
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
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from bloombee.core import PeerId
    from bloombee.server.stage import StageServer


def in_background(swarm: ClientSwarm, work: Coroutine[Any, Any, object]) -> None:
    swarm.loop.post(work)


def drain(swarm: ClientSwarm, stage: StageServer) -> None:
    """Tell a stage to stop, as SIGTERM would; call it in the loop's thread."""
    swarm.lost.add(peer_of(stage))
    in_background(swarm, stage.drain(5.0))


# Servers that leave ----------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_leaves_is_replaced_between_two_steps(
    three: ClientSwarm, local: Any, index: int
) -> None:
    leaver = three.stages[index]
    favour(three, leaver)
    spares(three, THREE[index])
    three.at_pass(leaver, 4, lambda: drain(three, leaver))
    model = three.model()
    same(local, model, max_new_tokens=30)
    assert recoveries(model) == 1
    assert three.serving(model, index) is not leaver
    all_free(three)


def test_an_idle_session_moves_at_once(three: ClientSwarm, local: Any) -> None:
    favour(three, three.stages[1])
    spares(three)
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=4)
        three.now(lambda: drain(three, three.stages[1]))
        until = time.monotonic() + 5
        while recoveries(model) == 0 and time.monotonic() < until:
            threading.Event().wait(0.02)
        assert three.serving(model, 1) is not three.stages[1]
        three.now(lambda: three.kill(three.stages[1]))
        same(local, model)
        assert recoveries(model) == 1
    all_free(three)


def test_a_stage_that_nobody_can_replace_serves_to_its_end(three: ClientSwarm, local: Any) -> None:
    three.at_pass(three.stages[1], 3, lambda: drain(three, three.stages[1]))
    model = three.model()
    same(local, model)
    assert recoveries(model) == 0
    all_free(three)


# Sessions that grow ----------------------------------------------------------------------------


def test_a_session_that_grows_while_a_stage_dies(three: ClientSwarm, local: Any) -> None:
    spares(three)
    model = three.model()
    cache = model.new_cache(BatchTerms(1, 12))
    text = prompt(1, 10)
    model(text, cache=cache)
    three.now(lambda: three.kill(three.serving(model, 1)))
    rest = prompt(1, 10, seed=5)
    found = model(rest, cache=cache).logits
    expected = local(torch.cat((text, rest), 1)).logits[:, 10:]
    assert (found - expected).abs().max() < 1e-3
    cache.close()
    all_free(three)


def test_a_failed_move_to_a_larger_session_is_tried_again(three: ClientSwarm, local: Any) -> None:
    model = three.model(QUICK.model_copy(update={"recovery_s": 0.5, "open_s": 0.5}))
    cache = model.new_cache(BatchTerms(1, 12))
    text = prompt(1, 10)
    model(text, cache=cache)
    lost: PeerId = peer_of(three.stages[1])
    three.lost.add(lost)
    with pytest.raises(SwarmError):
        model(prompt(1, 10, seed=5), cache=cache)
    three.lost.discard(lost)
    rest = prompt(1, 10, seed=6)
    found = model(rest, cache=cache).logits
    expected = local(torch.cat((text, rest), 1)).logits[:, 10:]
    assert (found - expected).abs().max() < 1e-3
    cache.close()
    all_free(three)


# Calls cut short ----------------------------------------------------------------------------------


def test_a_session_goes_on_after_ctrl_c(three: ClientSwarm, local: Any) -> None:
    main = threading.main_thread().ident
    assert main is not None
    spares(three)
    model = three.model()
    with model.inference_session(max_length=2000):
        for turn in range(3):
            timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                model.generate(IDS, max_new_tokens=1900, **GREEDY)
            if turn:
                three.now(killer(three, three.serving(model, turn)))
            same(local, model, torch.cat((IDS, prompt(1, 3, turn)), 1))
    all_free(three)


def test_beams_after_ctrl_c(three: ClientSwarm, local: Any) -> None:
    """A step cut short may have forked and shortened sequences already."""
    main = threading.main_thread().ident
    assert main is not None
    model = three.model()
    cache = model.new_cache(BatchTerms(3, 400))
    ids = prompt(3, 6)
    for _ in range(3):
        timer = threading.Timer(0.4, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                model(prompt(3, 5), cache=cache)
                cache.reorder_cache(torch.tensor([2, 2, 0]))
                cache.crop(-4)
        cache.reset()
        found = model(ids, cache=cache).logits
        assert (found - local(ids).logits).abs().max() < 1e-3
    cache.close()
    all_free(three)


# Servers that are full ---------------------------------------------------------------------


def test_a_full_swarm_is_waited_for(three: ClientSwarm, local: Any) -> None:
    model = three.model(QUICK.model_copy(update={"queue_s": 10.0}))
    holder = three.model()
    held = holder.new_cache(BatchTerms(2, 2000))
    holder(prompt(2, 4), cache=held)
    ending = threading.Timer(0.5, held.close)
    ending.start()
    same(local, model, prompt(1, 300))
    ending.join()
    all_free(three)


def test_a_swarm_that_stays_full_says_how_much_was_free(three: ClientSwarm) -> None:
    holder = three.model()
    held = holder.new_cache(BatchTerms(2, 2000))
    holder(prompt(2, 4), cache=held)
    with pytest.raises(KVFull, match=r"\d+ .*free.* asked"):
        three.model().generate(prompt(1, 300), max_new_tokens=NEW, **GREEDY)
    held.close()
    all_free(three)


# Rotation by length ------------------------------------------------------------------------


def test_a_model_that_rotates_by_length_is_rebuilt_as_it_was(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = tiny_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    source = open_source(str(path))
    with ClientSwarm(source, THREE, Size(kv_tokens=4096)) as swarm:
        for index in (0, 1):
            favour(swarm, swarm.stages[index])
            swarm.at_pass(swarm.stages[index], 12 + index, killer(swarm, swarm.stages[index]))
        spares(swarm, Span(0, 2), Span(2, 4))
        model = swarm.model()
        same(reference(path), model, prompt(1, 26), max_new_tokens=30)
        assert recoveries(model) == 2
