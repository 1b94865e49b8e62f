"""A span of blocks that runs on packed tokens: transformers' layers, our attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from bloombee.core import Span
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.models.attention import PackedStep
from bloombee.models.linear import Floors, make_invariant
from bloombee.models.rotary import Rotary
from bloombee.models.source import ModelSource
from bloombee.models.weights import fill


class SpanModel:
    """Blocks `[start, end)` of one model, weights loaded, ready to run steps."""

    def __init__(
        self, source: ModelSource, span: Span, layers: Sequence[nn.Module], rotary: Rotary | None
    ) -> None:
        self.span = span
        self.hidden_size = source.hidden_size
        self._arguments = source.spec.layer_arguments
        # Layers are called through `forward`: nn.Module's hooks cost time and none is set.
        self._forwards = [layer.forward for layer in layers]
        self._rotary = rotary
        weight = next(layers[0].parameters())
        self.dtype, self.device = weight.dtype, weight.device

    @classmethod
    def load(
        cls,
        source: ModelSource,
        span: Span,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: bool = True,
    ) -> Self:
        """Read the span's tensors, and nothing else, into new layers.

        Raises ModelError for blocks the model lacks and tensors the checkpoint lacks.
        """
        source.check_span(span)
        outline = source.outline()
        blocks = source.spec.parts.blocks
        paths = [f"{blocks}.{index}" for index in range(span.start, span.end)]
        modules = {path: outline.get_submodule(path) for path in paths}
        fill(source, modules, dtype=dtype, device=device, progress=progress)
        if torch.device(device).type == "cpu":
            floors: Floors = {}
            for module in modules.values():
                make_invariant(module, floors)
        return cls(source, span, list(modules.values()), _rotary(source, outline, device))

    def forward(
        self,
        rows: Float[torch.Tensor, "T D"],
        batch: Sequence[BatchItem],
        pool: KVPool,
        span: Span | None = None,
    ) -> Float[torch.Tensor, "T D"]:
        """Run the blocks on the packed tokens of `batch`; returns rows for the next span.

        `span` is a part of the blocks held (default: all of them).

        Writes K and V of the new tokens into `pool`. When anything fails, the pool is as
        before and the error passes through (RequestError when `batch` does not fit it).
        """
        plan = pool.begin(batch)
        try:
            out = self._run(rows, batch, PackedStep(pool, plan), span or self.span)
        except BaseException:
            pool.abort(plan)
            raise
        pool.finish(plan)
        return out

    def _run(
        self, rows: torch.Tensor, batch: Sequence[BatchItem], step: PackedStep, span: Span
    ) -> torch.Tensor:
        tables = [item.table for item in batch]
        parts = [table.positions for table in tables]
        positions = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
        positions = positions.to(self.device)
        hidden = rows.unsqueeze(0)  # [1, T, D]
        arguments: dict[str, Any] = {"packed_step": step}
        if self._arguments.positions is not None:
            arguments[self._arguments.positions] = positions.unsqueeze(0)
        if self._rotary is not None and self._arguments.rotary is not None:
            counts = [count for table in tables for count in table.counts]
            arguments[self._arguments.rotary] = self._rotary(hidden, positions, counts)
        first = self.span.start
        for forward in self._forwards[span.start - first : span.end - first]:
            hidden = forward(hidden, attention_mask=None, **arguments)
        return hidden[0]


def _rotary(source: ModelSource, outline: nn.Module, device: torch.device | str) -> Rotary | None:
    path = source.spec.parts.rotary
    if path is None:
        return None
    # Its frequencies are no weights: a new one computes them from the config.
    module = type(outline.get_submodule(path))(config=source.config)
    return Rotary(module.to(device), source.config)
