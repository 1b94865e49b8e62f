"""Tiny random models of every family, saved as real checkpoints, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

BLOCKS = 5
VOCABULARY = 211
WINDOW = 16

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 6,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
GROUPED: dict[str, Any] = {"intermediate_size": 80, "num_key_value_heads": 2}
PARTIAL_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
# What each family adds to or changes in SHAPE, so that its own features are at work.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": WINDOW},
    "qwen2": GROUPED
    | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": GROUPED | {"head_dim": 16},
    "gpt_neox": {"intermediate_size": 96, "hidden_size": 96, "rope_parameters": PARTIAL_ROTARY},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 32, "dropout": 0.0},
}
FAMILIES = tuple(SETTINGS)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Five blocks of hidden 48 (GPT-NeoX 96); `changes` override any setting."""
    return AutoConfig.for_model(family, **SHAPE | SETTINGS[family] | changes)


def tiny_model(
    family: str,
    folder: Path,
    *,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Save a random model of `family` under `folder`; returns the checkpoint's folder.

    `sharded` splits it into many files with an index; `changes` go to the config.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype)
    _randomise_vectors(model)
    path = folder / f"{family}-{'sharded' if sharded else 'single'}-{seed}"
    model.save_pretrained(path, max_shard_size="60KB" if sharded else "5GB")
    return path


def _randomise_vectors(model: PreTrainedModel) -> None:
    """Norms start as ones and biases as zeros, which would hide their loss."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def reference(path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers runs it, with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()
