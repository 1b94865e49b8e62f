"""Rotary embeddings of packed tokens: one client's long prompt leaves the others' alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bloombee.models.rotary import Rotary
from tests.tiny import tiny_config

if TYPE_CHECKING:
    from transformers import LlamaConfig

LIMIT = 32
HEAD = 16
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * (HEAD // 2),
    "long_factor": [3.0] * (HEAD // 2),
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def rotary(parameters: dict[str, Any]) -> tuple[Rotary, LlamaConfig]:
    longest = LIMIT * 4 if parameters is LONGROPE else LIMIT
    changes = {"max_position_embeddings": longest, "head_dim": HEAD}
    config = cast("LlamaConfig", tiny_config("llama", rope_parameters=parameters, **changes))
    return Rotary(LlamaRotaryEmbedding(config), config), config


def alone(config: LlamaConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers computes for a sequence by itself, with a fresh module."""
    return LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])


@pytest.mark.parametrize("parameters", [DEFAULT, DYNAMIC, LONGROPE])
def test_each_sequence_gets_what_it_would_get_alone(parameters: dict[str, Any]) -> None:
    module, config = rotary(parameters)
    steps = [
        [torch.arange(5), torch.arange(60), torch.arange(7, 9)],
        [torch.tensor([3]), torch.tensor([60]), torch.tensor([31])],
        [torch.arange(20)],
        [torch.arange(100)],
        [torch.tensor([32]), torch.tensor([9])],
    ]
    for pieces in steps:
        cos, sin = module(torch.zeros(1), torch.cat(pieces), [len(piece) for piece in pieces])
        wanted = [alone(config, piece) for piece in pieces]
        assert torch.equal(cos, torch.cat([pair[0] for pair in wanted], dim=1))
        assert torch.equal(sin, torch.cat([pair[1] for pair in wanted], dim=1))


def test_a_long_neighbour_would_change_the_tokens_otherwise() -> None:
    _, config = rotary(DYNAMIC)
    together = alone(config, torch.cat([torch.arange(5), torch.arange(60)]))[0]
    assert not torch.equal(together[:, :5], alone(config, torch.arange(5))[0])


def test_only_these_types_depend_on_length() -> None:
    assert not rotary(DEFAULT)[0].depends_on_length
    assert rotary(DYNAMIC)[0].depends_on_length
    assert rotary(LONGROPE)[0].depends_on_length
