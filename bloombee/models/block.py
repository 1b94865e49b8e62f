"""One block over packed tokens, whichever way it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import nn

from bloombee.models.attention import PackedStep
from bloombee.models.rotary import CosSin
from bloombee.models.spec import LayerArguments


@dataclass(frozen=True)
class BlockStep:
    """What all blocks of a span share in one step; `rotary` is `[1, T, E]` each."""

    packed: PackedStep
    positions: Int[torch.Tensor, "T"]
    rotary: CosSin | None

    @cached_property
    def turn(self) -> CosSin:
        """Cosines, and sines negated in their first half: `[T, 1, E]` each."""
        assert self.rotary is not None  # noqa: S101 - families with rotary only
        cos, sin = (part[0].unsqueeze(1) for part in self.rotary)
        half = sin.shape[-1] // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


class Block(Protocol):
    """Rows in, rows out; writes the step's K and V into its pool."""

    def __call__(
        self, rows: Float[torch.Tensor, "T D"], step: BlockStep
    ) -> Float[torch.Tensor, "T D"]: ...


class TransformersBlock:
    """Transformers' own decoder layer, called with `[1, T, D]` and no cache."""

    def __init__(self, layer: nn.Module, arguments: LayerArguments) -> None:
        # Called through `forward`: nn.Module's hooks cost time and none is set.
        self._forward = layer.forward
        self._arguments = arguments

    def __call__(
        self, rows: Float[torch.Tensor, "T D"], step: BlockStep
    ) -> Float[torch.Tensor, "T D"]:
        """Run the layer; the attention function finds `step.packed` in its arguments."""
        arguments: dict[str, Any] = {"packed_step": step.packed, "attention_mask": None}
        if self._arguments.positions is not None:
            arguments[self._arguments.positions] = step.positions.unsqueeze(0)
        if self._arguments.rotary is not None:
            arguments[self._arguments.rotary] = step.rotary
        return self._forward(rows.unsqueeze(0), **arguments)[0]
