"""The demonstration model as a folder that transformers of 2023 read as well as ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from benchmarks.worker import DEMO_MODEL, Job, load

if TYPE_CHECKING:
    from pathlib import Path

KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("initializer_range", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)


def save(folder: Path, dtype: str) -> None:
    """Write config and weights in `dtype` into `folder`, unless they are there."""
    weights = folder / "model.safetensors"
    if weights.exists():
        return
    model: Any = load(Job(DEMO_MODEL, "float32", 1))
    told = model.config.to_dict()
    config = {name: told[name] for name in KEPT} | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": dtype,
        "rope_theta": told["rope_parameters"]["rope_theta"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    kind = getattr(torch, dtype)
    tensors = {name: t.to(kind).clone() for name, t in model.state_dict().items()}
    save_file(tensors, weights, metadata={"format": "pt"})
