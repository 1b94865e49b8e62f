"""The ends of a model, which run where the token ids are: embeddings, final norm, head."""

from __future__ import annotations

from typing import Literal, Self

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import embedding

from bloombee.core import Span
from bloombee.errors import ModelError
from bloombee.models.linear import can_prepack, make_invariant
from bloombee.models.source import ModelSource
from bloombee.models.weights import fill

End = Literal["first", "last"]
"""What comes before the first block, and what comes after the last."""

FIRST: frozenset[End] = frozenset(("first",))
LAST: frozenset[End] = frozenset(("last",))
BOTH = FIRST | LAST
PARTS: dict[End, tuple[str, ...]] = {
    "first": ("embed", "position_table", "project_in"),
    "last": ("norm", "project_out", "head"),
}


def ends_of(span: Span, num_blocks: int) -> frozenset[End]:
    """The ends that adjoin a span of a model's blocks."""
    adjoins: dict[End, bool] = {"first": span.start == 0, "last": span.end == num_blocks}
    return frozenset(end for end, held in adjoins.items() if held)


def ends_bytes(
    source: ModelSource, ends: frozenset[End], *, dtype: torch.dtype, device: torch.device | str
) -> int:
    """What the weights of these ends take on `device`.

    A tied one is counted once, unless the head's copy has a layout of its own.
    """
    present = _present(source, source.blueprint, ends)
    # On `meta` tied weights are two.
    elements = {
        name: sum(p.numel() for p in module.parameters()) for name, module in present.items()
    }
    tied = bool(source.config.tie_word_embeddings) and len(ends) == len(BOTH)
    if tied and not (torch.device(device).type == "cpu" and can_prepack(dtype)):
        elements["head"] -= present["head"].get_parameter("weight").numel()
    return sum(elements.values()) * dtype.itemsize


class ModelEnds:
    """Embeddings, final norm and head of one model, or one end of it, weights loaded.

    `norm` gives what transformers calls the last hidden state; `logits` takes that.
    """

    def __init__(
        self,
        source: ModelSource,
        parts: dict[str, nn.Module],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.hidden_size = source.hidden_size
        self._offset = source.spec.position_offset
        self._parts = parts
        table = parts.get("position_table")
        self._table = None if table is None else table.get_parameter("weight")
        self._before = parts.get("project_in")
        self._norms = [parts[name] for name in ("norm", "project_out") if name in parts]
        self.dtype, self.device = dtype, torch.device(device)

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ends: frozenset[End] = BOTH,
        progress: bool = True,
    ) -> Self:
        """Read the tensors of the ends, and nothing else; a tied one only once.

        Raises ModelError for tensors the checkpoint lacks.
        """
        outline = source.outline()
        present = _present(source, outline, ends)
        tied = bool(source.config.tie_word_embeddings) and "last" in ends
        paths = source.spec.parts.model_dump()
        modules = {
            paths[name]: module for name, module in present.items() if name != "head" or not tied
        }
        embed = present.get("embed")
        if tied and embed is None:
            embed = modules[source.spec.parts.embed] = _required(outline, source.spec.parts.embed)
        fill(source, modules, dtype=dtype, device=device, progress=progress)
        if tied and embed is not None:
            present["head"].weight = embed.weight
        if torch.device(device).type == "cpu":
            # The head's copy in another layout is what makes it twice as fast.
            present = {name: make_invariant(module, {}) for name, module in present.items()}
        return cls(source, present, dtype=dtype, device=device)

    @property
    def embeddings(self) -> nn.Module:
        """The module that looks up token embeddings."""
        return self._parts["embed"]

    def embed(
        self, ids: Int[torch.Tensor, "T"], positions: Int[torch.Tensor, "T"]
    ) -> Float[torch.Tensor, "T D"]:
        """Rows that enter block 0. `positions` count only where positions are learned."""
        return self.place(self.embeddings(ids), positions)

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
        return self._parts["head"](normed)


def _present(source: ModelSource, outline: nn.Module, ends: frozenset[End]) -> dict[str, nn.Module]:
    """The parts of these ends that the model has."""
    paths = source.spec.parts.model_dump(exclude_none=True)
    names = [name for end in ends for name in PARTS[end] if name in paths]
    parts = {name: _part(outline, paths[name]) for name in names}
    return {name: module for name, module in parts.items() if module is not None}


def _required(outline: nn.Module, path: str) -> nn.Module:
    part = _part(outline, path)
    if part is None:
        raise ModelError(f"the model's {path} is None: correct the family spec")
    return part


def _part(outline: nn.Module, path: str) -> nn.Module | None:
    """A part by its path; None where the family's model sets the attribute to None."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(outline.get_submodule(parent), name)
    except AttributeError:
        raise ModelError(
            f"the family spec names {path}, which transformers' model lacks: correct the spec"
        ) from None
