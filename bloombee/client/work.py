"""New tokens of a session, as whoever has them hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float

from bloombee.client.history import Entry
from bloombee.client.ledger import NO_OPERATIONS
from bloombee.client.split import Want
from bloombee.core import PackedTable
from bloombee.protocol.messages import Operations

StepPhase = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """New tokens of a session: `entries` T ids or rows, in the order of `table`.

    With `rows` these are sent; without, all entries are ids, which are sent then.
    """

    table: PackedTable
    entries: Sequence[Entry]
    rows: Float[torch.Tensor, "T D"] | None = None
    operations: Operations = NO_OPERATIONS
    want: Want = "last"
    phase: StepPhase = "decode"
