"""What transformers holds in place of a KV cache: a batch that lives on the servers.

`RemoteCache` answers what `generate` asks of a cache (how many columns are held,
crop the last ones, reorder the beams) without a message to anyone.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from transformers import Cache

from bloombee.client.batch import RemoteBatch
from bloombee.core import Route
from bloombee.errors import RequestError


class RemoteCache(Cache):
    """The past of a batch, held by the servers of a route.

    `close` frees it there, and so does garbage collection. For one thread at a time.
    """

    def __init__(self, batch: RemoteBatch) -> None:
        super().__init__(layers=[])
        self.batch = batch

    def __repr__(self) -> str:
        return f"RemoteCache({self.batch.rows} rows, {self.batch.columns} columns)"

    @property
    def route(self) -> Route | None:
        """The stages that hold it; None before the first tokens."""
        return None if self.batch.session is None else self.batch.session.route

    def close(self) -> None:
        """Free it on the servers. It can't be continued afterwards."""
        self.batch.close()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held, masked ones included."""
        return self.batch.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The session's limit, or -1 when it grows."""
        return -1 if self.batch.terms.growable else self.batch.terms.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a mask for `query_length` more covers, and its offset, 0."""
        return self.batch.columns + query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        """As far as `generate` looks, there is one layer of full attention."""
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        """As far as `generate` looks, there is one layer of full attention."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        """Never: the model is elsewhere."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Always: servers keep all of the past."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Whether columns are held."""
        return self.batch.columns > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.batch.rows

    def activate_past_recording(self) -> None:
        """Nothing to do: all of the past is kept."""

    def update(self, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises RequestError: there are no keys and values here."""
        raise RequestError(
            "a RemoteCache holds no keys and values: use it with the model that made it"
        )

    def reset(self) -> None:
        """Forget all columns."""
        self.batch.crop(self.batch.columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns, as many as the negative number says.

        Raises RequestError when it is positive or fewer are held.
        """
        if tokens_to_remove > 0:
            raise RequestError(
                f"crop({tokens_to_remove}): give how many columns to remove as a negative number"
            )
        self.batch.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Int[torch.Tensor, " B"]) -> None:
        """Row i continues what row `beam_idx[i]` held; forked with the next step."""
        self.batch.select(beam_idx)

    def batch_select_indices(self, indices: Int[torch.Tensor, " N"]) -> None:
        """Keep these rows only, in this order."""
        self.batch.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; the next step raises RequestError when the session is too small."""
        self.batch.select(torch.arange(self.batch.rows).repeat_interleave(repeats))
