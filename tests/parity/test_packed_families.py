"""Every family, packed and cut into spans, against transformers' own unpadded runs."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from bloombee.core import PackedTable
from bloombee.kv import BatchItem
from bloombee.models import open_source
from tests.pipeline import Pipeline
from tests.tiny import FAMILIES, VOCABULARY, WINDOW, reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

NEW_TOKENS = 12
MIXED_LENGTHS = (1, 2, 3 * WINDOW, 7, WINDOW, WINDOW + 1, 40)

Models = tuple["PreTrainedModel", "Callable[[int], Pipeline]"]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The reference, and the same checkpoint in any number of stages."""
    folder = tmp_path_factory.mktemp("family")
    path = tiny_model(request.param, folder, sharded=True, eos_token_id=VOCABULARY + 1)
    source = open_source(str(path))
    return reference(path), cache(lambda stages: Pipeline(source, stages))


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


def expected_tokens(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    generate = cast("Any", model).generate
    outputs = [generate(torch.tensor([prompt]), **settings)[0] for prompt in prompts]
    return [out.tolist()[len(prompt) :] for out, prompt in zip(outputs, prompts, strict=True)]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunk", [None, 5, 1])
def test_logits_of_mixed_lengths(models: Models, stages: int, chunk: int | None) -> None:
    model, pipeline = models[0], models[1](stages)
    prompts = prompts_of(MIXED_LENGTHS)
    session = pipeline.open(len(prompts), max(MIXED_LENGTHS))
    logits = pipeline.prefill(session, prompts, chunk)
    pipeline.close(session)
    wanted = expected_logits(model, prompts)
    assert wanted.std() > 0.3, "a model this flat proves nothing"
    assert (logits - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(20,), MIXED_LENGTHS, (9,) * 32], ids=["1", "7", "32"])
def test_greedy_tokens(models: Models, stages: int, lengths: tuple[int, ...]) -> None:
    model, pipeline = models[0], models[1](stages)
    prompts = prompts_of(lengths, seed=len(lengths))
    assert pipeline.generate(prompts, NEW_TOKENS) == expected_tokens(model, prompts)


def test_chunks_change_no_token(models: Models) -> None:
    model, pipeline = models[0], models[1](2)
    prompts = prompts_of(MIXED_LENGTHS, seed=1)
    wanted = expected_tokens(model, prompts)
    assert pipeline.generate(prompts, NEW_TOKENS, chunk=7) == wanted
    assert pipeline.generate(prompts, NEW_TOKENS, chunk=33) == wanted


def test_pools_are_empty_and_whole_at_the_end(models: Models) -> None:
    for stages in (1, 2, 4):
        for pool in models[1](stages).pools:
            pool.check_integrity()
            assert pool.free_tokens == pool.total_tokens


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 48}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": False}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_settings_that_change_the_layers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(family, tmp_path, **changes)
    pipeline = Pipeline(open_source(str(path)), 2)
    prompts = prompts_of(MIXED_LENGTHS)
    session = pipeline.open(len(prompts), max(MIXED_LENGTHS))
    wanted = expected_logits(reference(path), prompts)
    assert (pipeline.prefill(session, prompts) - wanted).abs().max() < 1e-4


def test_last_hidden_states(models: Models) -> None:
    model, pipeline = models[0], models[1](2)
    (prompt,) = prompts_of((30,))
    session = pipeline.open(1, 30)
    item = BatchItem(session, PackedTable((0,), (0,), (30,)))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    assert (pipeline.last_hidden([item], prompt) - wanted).abs().max() < 1e-4
    pipeline.close(session)
