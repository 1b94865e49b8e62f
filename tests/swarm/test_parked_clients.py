"""Conversations of several clients that don't fit the servers at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from bloombee.core import Span
from bloombee.models import open_source
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.generation import prompt
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.client.model import DistributedModelForCausalLM

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
TURNS, CLIENTS = 3, 3


def test_each_gets_the_tokens_it_would_get_alone(tmp_path: Path) -> None:
    """Three sessions of 640 tokens, on servers with 1,024: one at a time holds its KV."""
    path = tiny_model("llama", tmp_path)
    local: Any = reference(path)
    seen = 0
    barrier = threading.Barrier(CLIENTS)

    def converse(model: DistributedModelForCausalLM, number: int) -> list[list[int]]:
        nonlocal seen
        text = prompt(1, 40, seed=number)
        said: list[list[int]] = []
        with model.inference_session(max_length=640):
            for turn in range(TURNS):
                text = torch.cat((text, prompt(1, 5, seed=10 * number + turn)), dim=1)
                text = model.generate(text, max_new_tokens=6, **GREEDY)
                said.append(text[0].tolist())
                seen += sum(stage.admission.parked for stage in swarm.stages)
                barrier.wait(60)
        return said

    def alone(number: int) -> list[list[int]]:
        text = prompt(1, 40, seed=number)
        said: list[list[int]] = []
        for turn in range(TURNS):
            text = torch.cat((text, prompt(1, 5, seed=10 * number + turn)), dim=1)
            text = local.generate(text, max_new_tokens=6, **GREEDY)
            said.append(text[0].tolist())
        return said

    size = Size(kv_tokens=1024, park_idle_s=0.1)
    spans = (Span(0, 2), Span(2, 5))
    patient = QUICK.model_copy(update={"queue_s": 30.0})
    with (
        ClientSwarm(open_source(str(path)), spans, size) as swarm,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        models = [swarm.model(patient) for _ in range(CLIENTS)]
        talks = [pool.submit(converse, model, number) for number, model in enumerate(models)]
        for number, talk in enumerate(talks):
            assert talk.result(90) == alone(number)
        assert seen > 0
        assert swarm.free_tokens() == [1024, 1024]
        assert [stage.admission.parked for stage in swarm.stages] == [0, 0]
