"""Tokens as callers give them, and the rows that enter the first block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from bloombee.client.history import Entry


@dataclass(frozen=True, slots=True)
class Tokens:
    """T packed new tokens: their ids, or token embeddings of width W."""

    ids: Int[torch.Tensor, " T"] | None = None
    embeds: Float[torch.Tensor, "T W"] | None = None

    def select(self, order: Sequence[int]) -> Tokens:
        """These of them, in this order."""
        picked = torch.tensor(order)
        return Tokens(*(None if t is None else t[picked] for t in (self.ids, self.embeds)))


Embed = Callable[[Tokens, torch.Tensor], torch.Tensor]
"""Tokens and positions `[T]` to the rows `[T, D]` that enter the first block."""


def embed_entries(
    embed: Embed, entries: Sequence[Entry], positions: Int[torch.Tensor, " T"]
) -> Float[torch.Tensor, "T D"]:
    """The rows of a history's entries at their positions, ids embedded anew."""
    known = [index for index, entry in enumerate(entries) if isinstance(entry, int)]
    given = {i: entry for i, entry in enumerate(entries) if isinstance(entry, torch.Tensor)}
    if not known:
        return torch.stack(list(given.values()))
    ids = torch.tensor([entries[index] for index in known], dtype=torch.long)
    embedded = embed(Tokens(ids), positions[known])
    if not given:
        return embedded
    given.update(zip(known, embedded, strict=True))
    return torch.stack([given[index] for index in range(len(entries))])
