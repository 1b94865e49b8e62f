"""Several turns over one session: what the servers hold is not computed again."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int

from bloombee.client.batch import RemoteBatch
from bloombee.client.cache import RemoteCache
from bloombee.core import Route
from bloombee.errors import RequestError


class InferenceSession:
    """What `model.inference_session` gives; valid until its block is left."""

    def __init__(self, model: object, cache: RemoteCache) -> None:
        self.model = model
        self.cache = cache

    @property
    def position(self) -> int:
        """Columns of the text that the servers hold. Set it lower to go back.

        The newest generated token is not held yet: it enters with the next turn.
        Setting it raises RequestError when it is negative or beyond what is held.
        """
        return self.cache.batch.columns

    @position.setter
    def position(self, position: int) -> None:
        held = self.cache.batch.columns
        if type(position) is not int or not 0 <= position <= held:
            raise RequestError(
                f"position {position!r}: the session holds {held} tokens; set 0 to {held}"
            )
        self.cache.batch.crop(held - position)

    @property
    def max_length(self) -> int:
        """Tokens that each row may have."""
        return self.cache.batch.terms.max_length

    @property
    def route(self) -> Route | None:
        """The stages that hold the session; None before the first tokens."""
        return self.cache.route

    def rewind_to_common(
        self, ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> None:
        """Go back to where `ids` `[B, S]` part from what is held, at most to their last column.

        Raises RequestError when there are no ids or their batch is another.
        """
        if ids is None:
            raise RequestError("generate in a session needs input_ids: the whole text so far")
        batch = self.cache.batch
        if ids.dim() != 2 or ids.shape[0] != batch.rows:
            raise RequestError(
                f"the session has {batch.rows} rows, input_ids are {list(ids.shape)}: "
                "open it with that batch_size"
            )
        visible = torch.ones(ids.shape, dtype=torch.bool)
        if attention_mask is not None:
            visible = attention_mask.cpu() != 0
        # Every row computes at least its last token again: its result is not kept.
        last = (visible * torch.arange(ids.shape[1])).amax(1)
        self.position = min(common_columns(batch, ids.cpu(), visible), int(last.min()))


def common_columns(
    batch: RemoteBatch, ids: Int[torch.Tensor, "B S"], visible: Bool[torch.Tensor, "B S"]
) -> int:
    """How many leading columns of `ids` the batch holds."""
    columns = min(batch.columns, ids.shape[1])
    held_visible = torch.ones(batch.rows, batch.columns, dtype=torch.bool)
    if batch.mask is not None:
        held_visible = batch.mask
    held = torch.full((batch.rows, batch.columns), -1)
    for row in range(batch.rows):
        entries = [entry if isinstance(entry, int) else -1 for entry in batch.entries(row)]
        held[row, held_visible[row]] = torch.tensor(entries, dtype=held.dtype)
    masked, seen = ~held_visible[:, :columns], visible[:, :columns]
    agree = (masked != seen) & (masked | (held[:, :columns] == ids[:, :columns]))
    return int(agree.all(0).long().cumprod(0).sum())
