"""The ends of a model, which run where the token ids are: embeddings, final norm, head."""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import embedding

from bloombee.errors import ModelError
from bloombee.models.linear import make_invariant
from bloombee.models.source import ModelSource
from bloombee.models.weights import fill


class ModelEnds:
    """Embeddings, final norm and head of one model, weights loaded.

    `norm` gives what transformers calls the last hidden state; `logits` takes that.
    """

    def __init__(self, source: ModelSource, parts: dict[str, nn.Module]) -> None:
        self.hidden_size = source.hidden_size
        self._offset = source.spec.position_offset
        self._embed = parts["embed"]
        table = parts.get("position_table")
        self._table = None if table is None else table.get_parameter("weight")
        self._before = parts.get("project_in")
        self._norms = [parts[name] for name in ("norm", "project_out") if name in parts]
        self._head = parts["head"]
        weight = next(self._embed.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    @classmethod
    def load(cls, source: ModelSource, *, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Read the tensors of the ends; and nothing else.

        Raises ModelError for tensors the checkpoint lacks.
        """
        outline = source.outline()
        paths = source.spec.parts.model_dump(exclude={"blocks", "rotary"}, exclude_none=True)
        parts = {name: _part(outline, path) for name, path in paths.items()}
        present = {name: module for name, module in parts.items() if module is not None}
        tied = bool(source.config.tie_word_embeddings)
        modules = {
            paths[name]: module for name, module in present.items() if name != "head" or not tied
        }
        fill(source, modules, dtype=dtype, device=device)
        if tied:
            present["head"].weight = present["embed"].weight
        if torch.device(device).type == "cpu":
            # The head's copy in another layout is what makes it twice as fast.
            present = {name: make_invariant(module, {}) for name, module in present.items()}
        return cls(source, present)

    @property
    def embeddings(self) -> nn.Module:
        """The module that looks up token embeddings."""
        return self._embed

    def embed(
        self, ids: Int[torch.Tensor, "T"], positions: Int[torch.Tensor, "T"]
    ) -> Float[torch.Tensor, "T D"]:
        """Rows that enter block 0. `positions` count only where positions are learned."""
        return self.place(self._embed(ids), positions)

    def place(
        self, rows: Float[torch.Tensor, "T W"], positions: Int[torch.Tensor, "T"]
    ) -> Float[torch.Tensor, "T D"]:
        """Rows that enter block 0, from token embeddings (W is D but for some OPT sizes)."""
        if self._before is not None:
            rows = self._before(rows)
        if self._table is not None:
            rows = rows + embedding(positions + self._offset, self._table)
        return rows

    def norm(self, rows: Float[torch.Tensor, "T D"]) -> Float[torch.Tensor, "T N"]:
        """Last hidden states of rows that left the last block (N is D but for some OPT sizes)."""
        for module in self._norms:
            rows = module(rows)
        return rows

    def logits(self, normed: Float[torch.Tensor, "T N"]) -> Float[torch.Tensor, "T V"]:
        """Scores over the vocabulary (V) of last hidden states."""
        return self._head(normed)


def _part(outline: nn.Module, path: str) -> nn.Module | None:
    """A part by its path; None where the family's model sets the attribute to None."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(outline.get_submodule(parent), name)
    except AttributeError:
        raise ModelError(
            f"the family spec names {path}, which transformers' model lacks: correct the spec"
        ) from None
