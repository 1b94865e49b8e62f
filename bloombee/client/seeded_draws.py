"""Seeded sampling where transformers chooses: its draws, from the generator that servers use."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bloombee.models.drawing import draw, gumbel


class SeededDraws(TorchFunctionMode):
    """Gives `torch.multinomial` the documented generator, in this thread and context only.

    Row r of the n-th call draws as sequence r its n-th token (see `models.drawing`).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.multinomial and kwargs.get("generator") is None:
            return self._multinomial(*args, **kwargs)
        return func(*args, **kwargs)

    def _multinomial(self, chances: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
        rows = chances if chances.dim() == 2 else chances[None]
        drawn, self._drawn = self._drawn, self._drawn + 1
        streams = range(len(rows))
        if num_samples == 1:
            tokens = draw(rows, self._seed, streams, [drawn] * len(rows))[:, None]
        else:
            tokens = self._several(rows, num_samples, drawn)
        return tokens if chances.dim() == 2 else tokens[0]

    def _several(self, rows: torch.Tensor, count: int, drawn: int) -> torch.Tensor:
        """Without replacement: those of the largest log-probability plus noise."""
        noise = [gumbel(self._seed, row, drawn, rows.shape[1]) for row in range(len(rows))]
        scores = rows.double().cpu().log() + torch.stack(noise)
        return scores.topk(count, dim=-1).indices.to(rows.device)
