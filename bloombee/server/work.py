"""A step on its way through the compute thread: what it carries, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int

from bloombee.core import PackedTable, PeerId, Phase, SessionId, Span
from bloombee.errors import BloomBeeError
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.models.sampling import Chooser, Chosen
from bloombee.protocol.messages import Operations
from bloombee.server.scheduler import NOBODY, WorkItem

Wanted = Literal["all", "last", "none"]
PROFILER = PeerId("the server itself")
"""The client of passes that a server times for its profile."""


class Model(Protocol):
    """What the server needs of a model: one forward pass over packed rows, and its ends."""

    span: Span
    hidden_size: int
    vocab_size: int
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

    def embed(
        self, ids: Int[torch.Tensor, "T"], positions: Int[torch.Tensor, "T"]
    ) -> Float[torch.Tensor, "T D"]:
        """Rows that enter block 0. Raises Unsupported unless it holds that block."""
        ...

    def logits(self, rows: Float[torch.Tensor, "R D"]) -> Float[torch.Tensor, "R V"]:
        """Float32 scores for rows that left the last block, through final norm and head.

        Raises Unsupported unless it holds that block.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: host rows in its wire dtype, or an error; times in microseconds.

    `chosen` are the tokens for the rows that have a chooser, in order; then there are no
    `rows`.
    """

    rows: Float[torch.Tensor, "R D"] | None
    error: BloomBeeError | None = None
    queue_us: int = 0
    compute_us: int = 0
    chosen: tuple[Chosen, ...] = ()
    copy_us: int = 0
    exposed_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A checked step for the compute thread.

    `client` asked for it, in the `background` if others go first. `rows` lie on the host: rows,
    or the ids of tokens to embed.
    `wanted` says which rows come back, in `wire_dtype`; with `choosers` (one for each row of
    the table, or None) none do, but the tokens chosen after the last of those rows.
    `done` is called once, on the event loop. It came at `arrived_us`, after `wire_us` on its way.
    """

    session: SessionId
    step: int
    phase: Phase
    span: Span
    table: PackedTable
    touches: frozenset[int]
    operations: Operations | None
    rows: Float[torch.Tensor, "T D"] | Int[torch.Tensor, "T"]
    wanted: Wanted
    wire_dtype: torch.dtype
    done: Callable[[Outcome], None]
    client: PeerId = NOBODY
    background: bool = False
    choosers: tuple[Chooser | None, ...] = ()
    arrived_us: int = 0
    wire_us: int = 0

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen at its end."""
        return any(chooser is not None for chooser in self.choosers)


@dataclass(slots=True, eq=False)
class Waiting:
    """A step in the queue, and how much of it has run."""

    work: StepWork
    item: WorkItem
    arrived_us: int
    computed: int = 0
    operated: bool = False
    outputs: list[torch.Tensor] = field(default_factory=list)
    chosen: tuple[Chosen, ...] = ()
    queue_us: int = 0
    compute_us: int = 0
    copy_us: int = 0
    exposed_us: int = 0

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
            background=work.background,
        )
        return cls(work, item, arrived_us)

    def share_table(self, tokens: int) -> PackedTable:
        """The packed table of the next `tokens`."""
        if tokens == self.work.table.tokens:
            return self.work.table
        return self.work.table.select(self.computed, self.computed + tokens)

    def share_rows(self, tokens: int) -> Float[torch.Tensor, "N D"] | Int[torch.Tensor, "N"]:
        """The input rows, or ids, of the next `tokens`."""
        if tokens == self.work.table.tokens:
            return self.work.rows
        return self.work.rows[self.computed : self.computed + tokens]

    def pick(self, output: Float[torch.Tensor, "N D"]) -> torch.Tensor | None:
        """The wanted rows among those of the share that just ran.

        They are on the host, unless tokens are to be chosen from them.
        """
        if self.work.chooses:
            return self._last(output, self.work.choosers)
        kept = self._wanted(output)
        return None if kept is None else kept.to(device="cpu", dtype=self.work.wire_dtype)

    def advance(self, tokens: int, kept: torch.Tensor | None) -> None:
        """Move past a share that ran."""
        self.computed += tokens
        if kept is not None:
            self.outputs.append(kept)

    def _wanted(self, output: torch.Tensor) -> torch.Tensor | None:
        table = self.work.table
        if self.work.wanted == "none":
            return output[:0] if self._ends_with(output) else None
        if self.work.wanted == "all" or table.is_decode:
            return output
        return self._last(output, table.sequences)

    def _last(self, output: torch.Tensor, asked: Sequence[object]) -> torch.Tensor | None:
        """The last rows in the share of sequences for which something is `asked`."""
        start = self.computed
        stop = start + len(output)
        last = [
            int(row) - start
            for row, wish in zip(self.work.table.last_rows, asked, strict=True)
            if wish is not None and start <= row < stop
        ]
        if len(last) == len(output):
            return output
        return output[last] if last else None

    def _ends_with(self, output: torch.Tensor) -> bool:
        return self.computed + len(output) == self.work.table.tokens

    @property
    def is_computed(self) -> bool:
        """Whether all of it has run."""
        return self.computed == self.work.table.tokens

    @property
    def choosers(self) -> list[Chooser]:
        """Those that choose a token each, from the rows of `joined` in order."""
        return [chooser for chooser in self.work.choosers if chooser is not None]

    def joined(self) -> Float[torch.Tensor, "R D"]:
        """All rows kept; the step has run."""
        return self.outputs[0] if len(self.outputs) == 1 else torch.cat(self.outputs)

    def result(self) -> Float[torch.Tensor, "R D"]:
        """All wanted rows; the step has run."""
        if self.work.chooses:
            return self.outputs[0][:0].to(device="cpu", dtype=self.work.wire_dtype)
        return self.joined()
