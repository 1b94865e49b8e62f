"""Linear layers whose rows do not depend on how many rows there are (DESIGN 13).

A token computed alone, in a chunk or among other clients' tokens must come out the
same to the last bit. Plain float32 products of one to three rows do not (measured: 2e-6
off). Weights laid out ahead for oneDNN do, as long as sums are short, and are faster.
Float32 sums are therefore split into parts, of a length that keeps logits as exact as
transformers': with parts of 192 the results here are those of the plain product of four
or more rows, bit for bit; SmolLM2's largest logit error against float64 is 6e-5, with
parts of 384 or longer up to 1.4e-4, beyond what parity allows. In bfloat16 parts would be
rounded; there, one row is padded to two. Each shape is measured on the processor it
runs on.

SmolLM2's seven products of a block, float32, one thread, us for 1 / 8 / 32 / 256 rows:
plain 908 / 1533 / 3053 / 18574, here 855 / 1154 / 1983 / 8889.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import nn
from torch.nn.functional import linear, pad

log = logging.getLogger(__name__)

# Layouts for this many rows or more were invariant; those for one row were not.
ROWS_HINT = 32
PART_LENGTH = 192
PART_MULTIPLE = 16
# oneDNN computes one row's longer sums in another order than several rows'.
LONGEST_SUM = 1024
TRIED_COUNTS = (1, 2, 3, 4, 5, 8)
MEASURED_ROWS = 40

Floors = dict[tuple[int, int, torch.dtype], int]
"""Least invariant number of rows by output size, input size and dtype, as measured."""


class InvariantLinear(nn.Module):
    """`x W^T + b` on CPU; takes over the weight of an nn.Linear, in oneDNN's layout if it can.

    `row_floor` is the least number of rows from which results no longer change; fewer
    are padded up to it.
    """

    def __init__(self, plain: nn.Linear, floors: Floors) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        dtype = plain.weight.dtype
        self._product = _product_of(plain)
        key = (self.out_features, self.in_features, dtype)
        if key not in floors:
            floors[key] = self._measure_floor(dtype)
        self.row_floor = floors[key]

    def forward(self, x: Float[torch.Tensor, "*B T I"]) -> Float[torch.Tensor, "*B T O"]:
        """The product, row by row independent of T."""
        rows = x.shape[-2]
        if rows < self.row_floor:
            return self._product(pad(x, (0, 0, 0, self.row_floor - rows)))[..., :rows, :]
        return self._product(x)

    def _measure_floor(self, dtype: torch.dtype) -> int:
        seed = torch.Generator().manual_seed(0)
        x = torch.randn(MEASURED_ROWS, self.in_features, generator=seed).to(dtype)
        whole = self._product(x)
        differing = [
            count
            for count in TRIED_COUNTS
            for start in range(0, MEASURED_ROWS - count, MEASURED_ROWS // 4)
            if not torch.equal(self._product(x[start : start + count]), whole[start:][:count])
        ]
        floor = max(differing, default=0) + 1
        if floor > TRIED_COUNTS[-1]:
            log.warning("products of %d rows still depend on their number here", floor - 1)
        # In bfloat16 one element in thousands shows it: too few to rely on measuring.
        seldom_seen = dtype is not torch.float32 and self.in_features > LONGEST_SUM
        return max(floor, 2) if seldom_seen else floor


Product = Callable[[torch.Tensor], torch.Tensor]


def _product_of(plain: nn.Linear) -> Product:
    """`x W^T + b` of a layer, over weights in oneDNN's layout where that can be had."""
    weight, bias = plain.weight.detach(), plain.bias
    if not can_prepack(weight.dtype):
        return partial(linear, weight=weight, bias=bias)
    if weight.dtype is torch.float32 and plain.in_features > PART_LENGTH:
        return _summed(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return lambda x: _pointwise(x, packed, bias, "none", [], "")


def _summed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product as a sum of products over parts of the input."""
    length = weight.shape[1]
    parts = -(-length // PART_LENGTH)
    step = -(-length // (parts * PART_MULTIPLE)) * PART_MULTIPLE
    bounds = pairwise([*range(0, length, step), length])
    (_, stop, first), *rest = [
        (low, high, torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), ROWS_HINT))
        for (low, high), part in zip(bounds, weight.split(step, dim=1), strict=True)
    ]

    def product(x: torch.Tensor) -> torch.Tensor:
        out = _pointwise(x[..., :stop], first, bias, "none", [], "")
        for low, high, packed in rest:
            out = _pointwise_onto(x[..., low:high], out, packed, None, "add")
        return out

    return product


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this machine has oneDNN's layouts for `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def make_invariant(module: nn.Module, floors: Floors) -> nn.Module:
    """`module` with every nn.Linear in it, or itself, replaced; CPU only.

    Modifies `module`, and `floors`, which spares measuring the same shape again.
    """
    if isinstance(module, nn.Linear):
        return InvariantLinear(module, floors)
    for name, child in module.named_children():
        setattr(module, name, make_invariant(child, floors))
    return module


_pointwise = torch.ops.mkldnn._linear_pointwise.default
_pointwise_onto = torch.ops.mkldnn._linear_pointwise.binary
