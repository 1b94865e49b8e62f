"""What tests of generation in a disturbed swarm share: who is struck, and what has to be equal."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from bloombee.core import PeerId, Span
from tests.generation import prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.server.stage import StageServer
    from tests.client_swarm import ClientSwarm

THREE = (Span(0, 2), Span(2, 4), Span(4, 5))
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = prompt(1, 9)
NEW = 12


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
    local: Any,
    model: DistributedModelForCausalLM,
    ids: torch.Tensor = IDS,
    head: str = "auto",
    **more: Any,
) -> None:
    arguments = {**GREEDY, "max_new_tokens": NEW, **more}
    expected = local.generate(ids, **arguments)
    assert model.generate(ids, head=head, **arguments).tolist() == expected.tolist()


def peer_of(stage: StageServer) -> PeerId:
    return PeerId(stage.endpoint.peer)


def recoveries(model: DistributedModelForCausalLM) -> int:
    assert model.traffic is not None
    return len(model.traffic.recoveries)


def killer(swarm: ClientSwarm, doomed: StageServer) -> Callable[[], None]:
    return lambda: swarm.kill(doomed)


def favour(swarm: ClientSwarm, stage: StageServer, speed: float = 1e6) -> None:
    """Let routing prefer this stage over its spare."""
    swarm.speeds[stage.endpoint.peer] = speed
