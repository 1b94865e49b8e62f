"""Rows of a product do not depend on how many rows there are, to the last bit."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from bloombee.models.linear import InvariantLinear, can_prepack, make_invariant

COUNTS = (1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(48, 211), (385, 64), (576, 192), (1536, 576), (4096, 64)]
)
def test_rows_are_independent_of_their_number(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(inputs)
    layer = InvariantLinear(nn.Linear(inputs, outputs, dtype=dtype), {})
    x = torch.randn(1, max(COUNTS), inputs).to(dtype)
    with torch.inference_mode():
        whole = layer(x)
        for count in COUNTS:
            for start in {0, 3, max(COUNTS) - count} if count < max(COUNTS) else {0}:
                rows = slice(start, start + count)
                assert torch.equal(layer(x[:, rows]), whole[:, rows]), (count, start)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", [48, 384, 400, 1000, 1536])
def test_the_product_is_that_of_the_plain_layer(inputs: int, bias: bool) -> None:
    torch.manual_seed(inputs)
    plain = nn.Linear(inputs, 70, bias=bias)
    layer = InvariantLinear(plain, {})
    x = torch.randn(9, inputs)
    exact = deepcopy(plain).double()(x.double())
    with torch.inference_mode():
        assert (layer(x) - exact).abs().max() < 3e-6
        assert layer(x[None]).shape == (1, 9, 70)


def test_without_onednn_one_to_three_rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloombee.models.linear.can_prepack", lambda dtype: False)
    torch.manual_seed(0)
    layer = InvariantLinear(nn.Linear(576, 192), {})
    x = torch.randn(64, 576)
    with torch.inference_mode():
        whole = layer(x)
        assert all(torch.equal(layer(x[:count]), whole[:count]) for count in range(1, 9))


def test_a_shape_is_measured_once_and_every_layer_replaced() -> None:
    block = nn.Sequential(nn.Linear(48, 48), nn.Sequential(nn.ReLU(), nn.Linear(48, 48)))
    floors: dict[tuple[int, int, torch.dtype], int] = {}
    make_invariant(block, floors)
    assert not any(isinstance(module, nn.Linear) for module in block.modules())
    assert list(floors) == [(48, 48, torch.float32)]
    assert not can_prepack(torch.float16)
