"""The hand-written layers give what transformers' layers give here, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.kv import BatchItem, make_pool
from bloombee.models import ModelSource, SpanModel, open_source
from bloombee.models.block import TransformersBlock
from bloombee.models.gated_block import GatedBlock
from bloombee.models.spec import families
from tests.tiny import BLOCKS, SETTINGS, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

GATED = tuple(family for family in SETTINGS if families()[family].gated is not None)
# Elementwise kernels take the last odd elements another way: sizes that leave none.
ALIGNED = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 32}
SESSION = SessionId(b"twin" * 4)
TABLES = (
    PackedTable((0, 1, 2), (0, 0, 0), (40, 1, 23)),
    PackedTable((1, 2), (1, 23), (1, 1)),
    PackedTable((2,), (24,), (1,)),
    PackedTable((0,), (40,), (5,), (-1, 0, 0, 1, -1)),
)


def outputs(source: ModelSource, dtype: torch.dtype, *, plain: bool) -> list[torch.Tensor]:
    span = Span(0, BLOCKS)
    model = SpanModel.load(source, span, dtype=dtype, device="cpu", plain=plain)
    assert isinstance(model._blocks[0], TransformersBlock if plain else GatedBlock)
    pool = make_pool(source.kv_shape(span, dtype, "cpu"), 512, max_length=128)
    pool.reserve(SESSION, 3, 128)
    noise = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        return [
            model.forward(
                torch.randn(table.tokens, source.hidden_size, generator=noise).to(dtype),
                [BatchItem(SESSION, table)],
                pool,
            )
            for table in TABLES
        ]


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", GATED)
def test_both_layers_give_the_same_bits(
    family: str, dtype: torch.dtype, other: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = ALIGNED | ({"hidden_act": "gelu"} if other else {})
    if family == "llama":
        changes |= {"attention_bias": other, "mlp_bias": other}
    source = open_source(str(tiny_model(family, tmp_path, **changes)))
    fast = outputs(source, dtype, plain=False)
    for ours, theirs in zip(fast, outputs(source, dtype, plain=True), strict=True):
        assert torch.equal(ours, theirs)
    assert fast[0].float().std() > 0.1


def test_the_llama_family_is_hand_written() -> None:
    assert GATED == ("llama", "mistral", "qwen2", "qwen3")
