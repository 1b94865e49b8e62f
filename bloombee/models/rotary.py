"""Rotary embeddings of packed tokens, computed once a step for all blocks.

`dynamic` and `longrope` choose their frequencies by the longest position of the
call. In a packed step that would be somebody else's: such steps are computed one
sequence at a time, each as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

LENGTH_DEPENDENT = ("dynamic", "longrope")

CosSin = tuple[torch.Tensor, torch.Tensor]


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether a token's rotation depends on how long the prompt is that it comes in."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = str(parameters.get("rope_type", "default"))
    return any(name in kind for name in LENGTH_DEPENDENT)


class Rotary:
    """Cosines and sines for packed positions, from the family's own rotary module."""

    def __init__(self, module: torch.nn.Module, config: PreTrainedConfig) -> None:
        self._module = module
        parameters = config.rope_parameters or {}
        self.depends_on_length = depends_on_length(config)
        longest = config.max_position_embeddings
        original = parameters.get("original_max_position_embeddings") or longest
        self._unscaled_length = min(int(original), int(longest))

    def __call__(
        self, like: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]
    ) -> CosSin:
        """Cosine and sine `[1, T, E]` in the dtype of `like` for `positions` `[T]`.

        `counts` are the tokens of each sequence in turn; they sum to T.
        """
        if not self.depends_on_length or int(positions.max()) < self._unscaled_length:
            return self._module(like, positions.unsqueeze(0))
        pairs = [self._alone(like, piece) for piece in positions.split(list(counts))]
        cos, sin = zip(*pairs, strict=True)
        return torch.cat(cos, dim=1), torch.cat(sin, dim=1)

    def _alone(self, like: torch.Tensor, positions: torch.Tensor) -> CosSin:
        # The module remembers the longest call: each sequence gets a fresh copy.
        return copy.deepcopy(self._module)(like, positions.unsqueeze(0))
