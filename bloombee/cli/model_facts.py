"""Facts of a model by name: from the table that comes along, else from its own config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bloombee.config.clusters import model_sizes
from bloombee.planner.clusters import model_facts
from bloombee.planner.profiles import ModelFacts


def facts_of(model: str, value_bytes: int) -> ModelFacts:
    """Sizes of `model`: a name of configs/planner/models.yaml, or what --model takes elsewhere.

    Raises ModelError when there is no such model.
    """
    sizes = model_sizes().get(model.lower())
    if sizes is not None and not Path(model).exists():
        return model_facts(model, sizes, value_bytes)
    return _from_config(model, value_bytes)


def _from_config(model: str, value_bytes: int) -> ModelFacts:
    # torch and transformers take seconds to import: not for the models of the table.
    import torch

    from bloombee.core import Span
    from bloombee.models.locate import locate
    from bloombee.models.source import ModelSource

    source = ModelSource(locate(model))
    shape = source.kv_shape(Span(0, 1), torch.bfloat16, "cpu")
    parameters = source.block_bytes(torch.bfloat16) // 2
    ends_bytes = source.vocab_size * source.hidden_size * value_bytes
    facts = ModelFacts(
        name=source.name,
        blocks=source.num_blocks,
        hidden_size=source.hidden_size,
        block_bytes=parameters * value_bytes,
        block_parameters=parameters,
        kv_bytes_per_token=2 * shape.kv_heads * shape.head_size * value_bytes,
        attention_size=int(source.config.num_attention_heads) * shape.head_size,
        embed_bytes=ends_bytes,
        head_bytes=ends_bytes,
        tied=bool(getattr(source.config, "tie_word_embeddings", False)),
    )
    return replace(facts, wire_bytes_per_value=value_bytes)
