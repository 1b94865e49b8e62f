"""The real SmolLM2 on two stages, whose last one chooses the tokens: transformers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

from bloombee.client.seeded_draws import SeededDraws
from bloombee.core import Span
from bloombee.models import open_source
from tests.client_swarm import QUICK, ClientSwarm, Size

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW = 10
TEXTS = [
    "Once upon a time there was a",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "Water boils at one hundred degrees.",
    "The",
    "1, 2, 3, 4,",
]


@pytest.fixture(scope="module")
def swarm() -> Iterator[ClientSwarm]:
    spans = (Span(0, 14), Span(14, 30))
    with ClientSwarm(open_source("smollm2"), spans, Size(kv_tokens=1024)) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def local(swarm: ClientSwarm) -> Any:
    path = swarm.source.gguf_path
    assert path is not None
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).eval()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tokens_are_those_of_transformers(swarm: ClientSwarm, local: Any) -> None:
    tokenizer = swarm.source.tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    greedy: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.1}
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
    for choice in (greedy, drawn):
        arguments = {**inputs, **choice, "max_new_tokens": NEW, "pad_token_id": 0}
        with SeededDraws(4):
            expected = local.generate(**arguments).tolist()
        for head, count in (("client", 1), ("server", 1), ("server", 3)):
            model = swarm.model(QUICK.model_copy(update={"micro_batches": count}))
            found = model.generate(**arguments, head=head, seed=4)
            assert found.tolist() == expected, (head, count, choice)
