"""The real model, float32, packed and cut into spans, against transformers' own generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from bloombee.models import open_source
from tests.pipeline import Pipeline

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bloombee.models import ModelSource

TEXTS = (
    "The",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at one hundred degrees. " * 12,
    "In 1969 the first people",
)
LONG_PROMPT = 1500
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_source("smollm2")


@pytest.fixture(scope="module")
def local(source: ModelSource) -> PreTrainedModel:
    path = source.gguf_path
    assert path is not None
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    return cast("PreTrainedModel", model.eval())


@pytest.fixture(scope="module")
def prompts(source: ModelSource) -> list[list[int]]:
    return [source.tokenizer()(text)["input_ids"] for text in TEXTS]


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    generate = cast("Any", model).generate
    out = generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0].tolist()[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 4])
def test_greedy_tokens_and_logits(
    source: ModelSource, local: PreTrainedModel, prompts: list[list[int]], stages: int
) -> None:
    pipeline = Pipeline(source, stages)
    wanted = [greedy(local, prompt, NEW_TOKENS) for prompt in prompts]
    assert pipeline.generate(prompts, NEW_TOKENS) == wanted
    assert pipeline.generate(prompts[3:4], NEW_TOKENS, chunk=4) == wanted[3:4]
    session = pipeline.open(len(prompts), 256)
    logits = pipeline.prefill(session, prompts)
    with torch.inference_mode():
        exact = torch.cat([local(torch.tensor([prompt])).logits[0] for prompt in prompts])
    assert (logits - exact).abs().max() < 1e-4


@pytest.mark.slow
def test_a_long_prompt_in_chunks(
    source: ModelSource, local: PreTrainedModel, prompts: list[list[int]]
) -> None:
    prompt = (prompts[5] * 20 + prompts[3] * 100)[:LONG_PROMPT]
    pipeline = Pipeline(source, 2)
    wanted = greedy(local, prompt, 8)
    assert pipeline.generate([prompt], 8, chunk=512) == [wanted]
    assert pipeline.generate([prompt, prompts[0]], 8, chunk=300)[0] == wanted


@pytest.mark.slow
def test_batch_of_32(source: ModelSource, local: PreTrainedModel, prompts: list[list[int]]) -> None:
    pipeline = Pipeline(source, 1)
    wanted = [greedy(local, prompt, 6) for prompt in prompts]
    many = [prompts[index % len(prompts)] for index in range(32)]
    assert pipeline.generate(many, 6) == [wanted[index % len(prompts)] for index in range(32)]
