"""A step on its way through the compute thread: what it carries, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from jaxtyping import Float

from bloombee.core import PackedTable, PeerId, Phase, SessionId, Span
from bloombee.errors import BloomBeeError
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.protocol.messages import Operations
from bloombee.server.scheduler import NOBODY, WorkItem

Wanted = Literal["all", "last", "none"]


class Model(Protocol):
    """What the server needs of a model: one forward pass over packed rows."""

    span: Span
    hidden_size: int
    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        rows: Float[torch.Tensor, "T D"],
        batch: Sequence[BatchItem],
        pool: KVPool,
        span: Span | None = None,
    ) -> Float[torch.Tensor, "T D"]:
        """Run the blocks of `span` (default: all it holds); modifies the pool."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: host rows in its wire dtype, or an error; times in microseconds."""

    rows: Float[torch.Tensor, "R D"] | None
    error: BloomBeeError | None = None
    queue_us: int = 0
    compute_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A checked step for the compute thread.

    `client` asked for it. `rows` lie on the host. `wanted` says which rows come back,
    in `wire_dtype`. `done` is called once, on the event loop.
    """

    session: SessionId
    step: int
    phase: Phase
    span: Span
    table: PackedTable
    touches: frozenset[int]
    operations: Operations | None
    rows: Float[torch.Tensor, "T D"]
    wanted: Wanted
    wire_dtype: torch.dtype
    done: Callable[[Outcome], None]
    client: PeerId = NOBODY


@dataclass(slots=True, eq=False)
class Waiting:
    """A step in the queue, and how much of it has run."""

    work: StepWork
    item: WorkItem
    arrived_us: int
    computed: int = 0
    operated: bool = False
    outputs: list[torch.Tensor] = field(default_factory=list)
    queue_us: int = 0
    compute_us: int = 0

    @classmethod
    def of(
        cls, work: StepWork, arrival: int, arrived_us: int, *, divisible: bool = True
    ) -> Waiting:
        """`work` as it enters the queue; a draft tree is never `divisible`."""
        item = WorkItem(
            arrival=arrival,
            session=work.session,
            step=work.step,
            phase=work.phase,
            span=work.span,
            tokens=work.table.tokens,
            touches=work.touches,
            divisible=divisible and work.table.parents is None,
            client=work.client,
        )
        return cls(work, item, arrived_us)

    def share_table(self, tokens: int) -> PackedTable:
        """The packed table of the next `tokens`."""
        if tokens == self.work.table.tokens:
            return self.work.table
        return self.work.table.select(self.computed, self.computed + tokens)

    def share_rows(self, tokens: int) -> Float[torch.Tensor, "N D"]:
        """The input rows of the next `tokens`."""
        if tokens == self.work.table.tokens:
            return self.work.rows
        return self.work.rows[self.computed : self.computed + tokens]

    def pick(self, output: Float[torch.Tensor, "N D"]) -> torch.Tensor | None:
        """The wanted rows among those of the share that just ran, on the host."""
        kept = self._wanted(output)
        return None if kept is None else kept.to(device="cpu", dtype=self.work.wire_dtype)

    def advance(self, tokens: int, kept: torch.Tensor | None) -> None:
        """Move past a share that ran."""
        self.computed += tokens
        if kept is not None:
            self.outputs.append(kept)

    def _wanted(self, output: torch.Tensor) -> torch.Tensor | None:
        table, start = self.work.table, self.computed
        if self.work.wanted == "none":
            return None
        if self.work.wanted == "all" or table.is_decode:
            return output
        stop = start + len(output)
        last = [int(row) - start for row in table.last_rows if start <= row < stop]
        return output[last] if last else None

    def result(self) -> Float[torch.Tensor, "R D"]:
        """All wanted rows; the step has run."""
        if len(self.outputs) == 1:
            return self.outputs[0]
        if not self.outputs:
            return torch.empty(0, self.work.rows.shape[1], dtype=self.work.wire_dtype)
        return torch.cat(self.outputs)
