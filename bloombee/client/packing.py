"""Padded batches to packed rows and back.

A transformers batch is `[B, S]` with a mask; what travels is `[T, ...]`, the
unmasked tokens of all rows back to back. Left padding, right padding and holes
are all dropped the same way. On the way back a masked position takes the result
of the last unmasked token before it in its row: so the last column of a
right-padded batch carries every row's own last result, which is where `generate`
reads its logits. A masked position with nothing before it reads as zeros, or as
what the caller carries over from earlier steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped

from bloombee.errors import RequestError


@dataclass(frozen=True, slots=True)
class Packing:
    """How one `[B, S]` batch lies in `[T]` packed tokens.

    `counts` holds each row's unmasked tokens. `kept` are their flat indices into
    `B * S`, `origin` the packed index that every position reads back, -1 for
    none; both None when nothing is masked (then packing is a reshape).
    """

    counts: tuple[int, ...]
    columns: int
    kept: Int[torch.Tensor, " T"] | None = None
    origin: Int[torch.Tensor, "B S"] | None = None

    @classmethod
    def of(cls, batch: int, columns: int, mask: Shaped[torch.Tensor, "B S"] | None) -> Packing:
        """The packing of a batch whose unmasked positions are nonzero in `mask`.

        Raises RequestError when the mask has another shape.
        """
        if mask is None:
            return cls((columns,) * batch, columns)
        if tuple(mask.shape) != (batch, columns):
            raise RequestError(
                f"the attention mask is {list(mask.shape)}, the tokens are [{batch}, {columns}]"
            )
        visible = mask != 0
        if bool(visible.all()):
            return cls((columns,) * batch, columns)
        seen = visible.long().cumsum(1)  # [B, S]
        counts = seen[:, -1]
        before = counts.cumsum(0) - counts  # [B]
        origin = torch.where(seen > 0, before[:, None] + seen - 1, -1)
        kept = visible.flatten().nonzero().squeeze(1)
        return cls(tuple(counts.tolist()), columns, kept, origin)

    @property
    def tokens(self) -> int:
        """T, how many tokens are unmasked."""
        return sum(self.counts)

    @property
    def is_dense(self) -> bool:
        """Whether nothing is masked."""
        return self.kept is None

    def pack(self, batch: torch.Tensor) -> torch.Tensor:
        """`[B, S, ...]` to `[T, ...]`: the unmasked positions, row by row."""
        flat = batch.reshape(len(self.counts) * self.columns, *batch.shape[2:])
        return flat if self.kept is None else flat.index_select(0, self.kept)

    def unpack(
        self,
        packed: Float[torch.Tensor, "T D"],
        carried: Float[torch.Tensor, "B D"] | None = None,
    ) -> Float[torch.Tensor, "B S D"]:
        """`[T, D]` to `[B, S, D]`; positions before a row's first token read `carried` or 0."""
        rows = len(self.counts)
        if self.origin is None:
            return packed.reshape(rows, self.columns, -1)
        if carried is None:
            carried = packed.new_zeros(rows, packed.shape[1])
        table = torch.cat((packed, carried))  # [T + B, D]
        absent = packed.shape[0] + torch.arange(rows).unsqueeze(1)  # [B, 1]
        return table[torch.where(self.origin < 0, absent, self.origin)]

    def unpack_last(
        self,
        last: Float[torch.Tensor, "R D"],
        carried: Float[torch.Tensor, "B D"] | None = None,
    ) -> Float[torch.Tensor, "B D"]:
        """The last column of `unpack`, from the last token of each of the R rows that have any."""
        present = [row for row, count in enumerate(self.counts) if count]
        if len(present) == len(self.counts):
            return last
        rows = (
            carried.clone()
            if carried is not None
            else last.new_zeros(len(self.counts), last.shape[1])
        )
        rows[present] = last
        return rows
