"""The real model, float32: prompts that begin alike give transformers' tokens, kept or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bloombee.core import Span
from bloombee.models import open_source
from bloombee.protocol.messages import PREFIX_TOKENS
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.swarm.beginning import adopted

if TYPE_CHECKING:
    from collections.abc import Iterator

C = PREFIX_TOKENS
SYSTEM = (
    "You are a patient beekeeper who answers in one short sentence. Bees live in hives, and every "
    "hive has one queen, some drones and many workers. Workers collect nectar from flowers, and "
    "on the way they carry pollen from one plant to another. In winter the bees stay close "
    "together and keep the queen warm. In spring the first flowers open and the work begins "
    "again. When a worker has found a rich field she dances on the comb, and her sisters learn "
    "from the dance how far it is and in which direction they have to fly. Honey is nectar from "
    "which the bees have taken most of the water, so that it keeps for many years. Never guess: "
    "say that you don't know when you don't, and ask when a question is not clear to you. "
)
QUESTIONS = ("Why do bees dance?", "How many queens are there?")
NEW = 8
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, ClientSwarm]]:
    source = open_source("smollm2")
    path = source.gguf_path
    assert path is not None
    local = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).eval()
    size = Size(kv_tokens=4096, prefix_bytes=1 << 28)
    with ClientSwarm(source, (Span(0, 13), Span(13, 30)), size) as swarm:
        yield local, swarm


@pytest.mark.slow
@pytest.mark.parametrize("count", [C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 30])
def test_the_same_tokens_around_the_ends_of_chunks(
    served: tuple[Any, ClientSwarm], count: int
) -> None:
    local, swarm = served
    tokenizer = swarm.source.tokenizer()
    system = tokenizer(SYSTEM)["input_ids"][:count]
    keeping = swarm.model()
    plain = swarm.model(QUICK.model_copy(update={"reuse_prompts": False}))
    for number, text in enumerate(QUESTIONS):
        ids = torch.tensor([system + tokenizer(text)["input_ids"]])
        expected = local.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS)
        assert keeping.generate(ids, **SETTINGS).tolist() == expected.tolist()
        assert sum(adopted(keeping)) == (count // C * C if number else 0)
        if number:
            assert plain.generate(ids, **SETTINGS).tolist() == expected.tolist()
        swarm.loop.run(_quiet(swarm))


async def _quiet(swarm: ClientSwarm) -> None:
    """Wait until all that was sent to be kept is kept: the jobs before this one."""
    for stage in swarm.stages:
        await stage.executor.free_tokens()
        await stage.executor.free_tokens()
