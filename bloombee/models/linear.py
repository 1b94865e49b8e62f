"""Linear layers whose rows do not depend on how many rows there are (DESIGN 13).

A token computed alone, in a chunk or among other clients' tokens must come out the
same to the last bit. Plain float32 products of one to three rows do not (measured: 2e-6
off). Weights laid out ahead for oneDNN do from two rows on, and cost half the time:
SmolLM2's seven products of a block take 494 us instead of 883 for one row, 1,447
instead of 3,177 for 32 (float32, one thread). What still differs is padded: each layer
is measured when it is made, with the processor it will run on.
"""

from __future__ import annotations

import logging

import torch
from jaxtyping import Float
from torch import nn
from torch.nn.functional import linear, pad

log = logging.getLogger(__name__)

# Layouts for this many rows or more were invariant; for one row (hint 1) they were not.
ROWS_HINT = 32
TRIED_COUNTS = (1, 2, 3, 4, 5, 8)
MEASURED_ROWS = 40
# Sums longer than this are split up for one row. In bfloat16 one element in thousands
# shows it, too few to rely on measuring.
LONGEST_PLAIN_SUM = 1024


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
        weight = plain.weight.detach()
        self._prepacked = can_prepack(weight.dtype)
        if self._prepacked:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self._weight = weight
        dtype = plain.weight.dtype
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

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._prepacked:
            return _prepacked_product(x, self._weight, self.bias, "none", [], "")
        return linear(x, self._weight, self.bias)

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
        return max(floor, 2) if self.in_features > LONGEST_PLAIN_SUM else floor


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


_prepacked_product = torch.ops.mkldnn._linear_pointwise.default
