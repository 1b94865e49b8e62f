"""What a call of the model brings: checked, and cut to the columns that are new."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped

from bloombee.client.batch import RemoteBatch
from bloombee.client.embedding import Tokens
from bloombee.client.packing import Packing
from bloombee.errors import RequestError


@dataclass(frozen=True, slots=True)
class Inputs:
    """New columns of a batch: ids or embeddings, and their mask (None: nothing is masked)."""

    ids: Int[torch.Tensor, "B S"] | None
    embeds: Float[torch.Tensor, "B S D"] | None
    mask: Shaped[torch.Tensor, "B S"] | None

    @property
    def batch(self) -> int:
        """B."""
        return self._given.shape[0]

    @property
    def columns(self) -> int:
        """S."""
        return self._given.shape[1]

    @property
    def _given(self) -> torch.Tensor:
        given = self.ids if self.ids is not None else self.embeds
        if given is None:
            raise RequestError("give input_ids or inputs_embeds")
        return given

    def repeats(self, group: int) -> bool:
        """Whether each `group` neighbouring rows are equal."""
        for tensor in (self.ids, self.embeds, self.mask):
            if tensor is None:
                continue
            groups = tensor.unflatten(0, (-1, group))
            if not torch.equal(groups, groups[:, :1].expand_as(groups)):
                return False
        return True

    def every(self, group: int) -> Inputs:
        """The first of each `group` rows."""
        if group == 1:
            return self
        kept = (None if t is None else t[::group] for t in (self.ids, self.embeds, self.mask))
        return Inputs(*kept)

    def packing(self) -> Packing:
        """How it lies when packed."""
        return Packing.of(self.batch, self.columns, self.mask)

    def tokens(self, packing: Packing) -> Tokens:
        """The packed tokens."""
        if self.ids is not None:
            return Tokens(ids=packing.pack(self.ids))
        return Tokens(embeds=packing.pack(self._given))


def read_inputs(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    held: RemoteBatch | None,
) -> Inputs:
    """The new columns, after those that `held` has already.

    Raises RequestError when both or neither input is given, for ranks, rows or a mask
    that don't fit, and for a mask that hides what is held or unhides what was hidden.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise RequestError("give either input_ids or inputs_embeds")
    if input_ids is not None and (input_ids.dim() != 2 or input_ids.is_floating_point()):
        raise RequestError(f"input_ids are [batch, columns] integers, got {_shape(input_ids)}")
    if inputs_embeds is not None and inputs_embeds.dim() != 3:
        raise RequestError(
            f"inputs_embeds are [batch, columns, hidden], got {_shape(inputs_embeds)}"
        )
    given = Inputs(input_ids, inputs_embeds, None)
    if not given.batch or not given.columns:
        raise RequestError("the batch is empty: give at least one token")
    if held is not None and held.rows != given.batch:
        raise RequestError(
            f"the cache holds {held.rows} rows, the batch has {given.batch}: use one cache a batch"
        )
    if attention_mask is None:
        return given
    return Inputs(input_ids, inputs_embeds, _new_mask(attention_mask, given, held))


def _new_mask(mask: torch.Tensor, given: Inputs, held: RemoteBatch | None) -> torch.Tensor:
    past = 0 if held is None else held.columns
    wanted = (given.batch, past + given.columns)
    if mask.dim() != 2 or tuple(mask.shape) != wanted:
        raise RequestError(
            f"the attention mask is {_shape(mask)}, it has to be [{wanted[0]}, {wanted[1]}]: "
            "held columns and new ones"
        )
    if held is not None and past:
        seen = (mask[:, :past] != 0).sum(1).tolist()
        if seen != held.lengths:
            raise RequestError(
                "the attention mask differs from the one that the held columns came with: "
                "use the same, or start without a cache"
            )
    return mask[:, past:]


def check_positions(position_ids: torch.Tensor, packing: Packing, first: list[int]) -> None:
    """Raise RequestError unless positions count each row's unmasked tokens one by one."""
    rows = len(packing.counts)
    given = packing.pack(position_ids[..., -packing.columns :].expand(rows, -1))
    counted = [
        torch.arange(start, start + count)
        for start, count in zip(first, packing.counts, strict=True)
    ]
    if not torch.equal(given.cpu().long(), torch.cat(counted)):
        raise RequestError(
            "position_ids must number each row's unmasked tokens without gaps: leave them out"
        )


def check_ids(tokens: Tokens, vocabulary: int) -> None:
    """Raise RequestError for an id that the embeddings have no row for."""
    if tokens.ids is None or not len(tokens.ids):
        return
    for token in (int(tokens.ids.min()), int(tokens.ids.max())):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"token id {token} is outside the model's vocabulary of {vocabulary}: "
                "use the model's own tokenizer"
            )


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
