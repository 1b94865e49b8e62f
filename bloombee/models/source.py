"""A model by name: its config, what it needs in memory, and who else serves the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bloombee.core import Span
from bloombee.errors import ModelError
from bloombee.kv.interface import KVShape
from bloombee.models.attention import register_attention
from bloombee.models.checkpoint import Checkpoint
from bloombee.models.fingerprint import fingerprint_of
from bloombee.models.locate import locate
from bloombee.models.rotary import depends_on_length
from bloombee.models.spec import FamilySpec, family_of


class ModelSource:
    """One model: reads its checkpoint lazily, builds nothing until asked.

    `max_length` is the longest sequence in tokens, `hidden_size` D, `native_dtype` what
    the checkpoint is stored in (float32 for GGUF).
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.name = checkpoint.name
        self.config: PreTrainedConfig = checkpoint.config()
        self.spec: FamilySpec = family_of(self.config.model_type, self.name)
        self.config._attn_implementation = register_attention()

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file, for checkpoints that are one."""
        return self._checkpoint.gguf_path

    @property
    def weights_file(self) -> Path | None:
        """A local file of weights, the largest; None where none is here."""
        return self._checkpoint.weights_file()

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_length(self) -> int:
        """Positions that the model has; `dynamic` rotary stretches them by its factor."""
        positions = int(self.config.max_position_embeddings)
        rope = getattr(self.config, "rope_parameters", None) or {}
        stretch = float(rope.get("factor", 1)) if "dynamic" in str(rope.get("rope_type")) else 1
        return int(positions * stretch)

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one step: see `rotary`."""
        return depends_on_length(self.config)

    @property
    def native_dtype(self) -> torch.dtype:
        dtype = self.config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """Identity of config and weights; the first call may hash the weights (seconds)."""
        return fingerprint_of(self._checkpoint.identity())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises ModelError when there is none."""
        return self._checkpoint.tokenizer()

    def generation_config(self) -> GenerationConfig:
        """The model's generation settings."""
        return self._checkpoint.generation_config()

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Weight bytes of the largest block in `dtype`."""
        blocks = self.blueprint.get_submodule(self.spec.parts.blocks).children()
        elements = max(sum(p.numel() for p in block.parameters()) for block in blocks)
        return elements * dtype.itemsize

    def kv_shape(self, span: Span, dtype: torch.dtype, device: torch.device | str) -> KVShape:
        """Shape of the KV of `span`. Raises ModelError when the model lacks those blocks."""
        self.check_span(span)
        config = self.config
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        return KVShape(span, kv_heads, head_size, dtype, torch.device(device))

    def check_span(self, span: Span) -> None:
        """Raise ModelError unless all blocks of `span` exist."""
        if span.end > self.num_blocks:
            raise ModelError(
                f"{self.name} has {self.num_blocks} blocks, so {span} goes too far: "
                f"use at most 0:{self.num_blocks}"
            )

    def outline(self) -> PreTrainedModel:
        """A new model of the family without weights (all parameters on `meta`)."""
        with torch.device("meta"):
            model = self.model_class(self.config)
        return model.eval().requires_grad_(requires_grad=False)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """The transformers class `...ForCausalLM`. Raises ModelError when there is none."""
        found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.config), None)
        if found is None:
            raise ModelError(f"{self.name} is no causal language model: choose one that is")
        return cast("type[PreTrainedModel]", found)

    @cached_property
    def blueprint(self) -> PreTrainedModel:
        """An outline to look at, not to fill."""
        return self.outline()

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint has that tensor."""
        return self._checkpoint.has_tensor(name)

    def tensors(
        self, names: Collection[str], *, progress: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read named tensors, as Checkpoint.tensors does."""
        return self._checkpoint.tensors(names, progress=progress)


def open_source(
    model: str, *, revision: str | None = None, cache_dir: Path | None = None
) -> ModelSource:
    """The model that a path, a hub id or an alias names.

    Downloads at most config and tokenizer files. Raises ModelError, in one line that
    names the mend, for wrong paths, unknown families, pickled weights and hub trouble.
    """
    return ModelSource(locate(model, revision=revision, cache_dir=cache_dir))
