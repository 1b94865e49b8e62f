"""A KV pool that only counts, and a model that only adds one: for tests of what runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import KVFull, RequestError
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

SPAN = Span(0, 4)
WIDTH = 3
VOCABULARY = 50


class CountingPlan(AttendPlan):
    def __init__(self, batch: Sequence[BatchItem]) -> None:
        self.batch = batch


class CountingPool(KVPool):
    """Keeps lengths and no tensors; pages are single tokens."""

    page_tokens = 1

    def __init__(self, total_tokens: int = 1000) -> None:
        self.shape = KVShape(SPAN, 1, 1, torch.float32, torch.device("cpu"))
        self.held: dict[SessionId, list[int]] = {}
        self.reserved: dict[SessionId, int] = {}
        self.calls: list[str] = []
        self._total = total_tokens

    @property
    def total_tokens(self) -> int:
        return self._total

    @property
    def free_tokens(self) -> int:
        return self._total - sum(self.reserved.values())

    def reserve(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> None:
        asked = (sequences - len(released)) * max_length
        if asked > self.free_tokens:
            raise KVFull(f"{self.free_tokens} tokens free, {asked} asked for")
        self.held[session] = [0] * sequences
        self.reserved[session] = asked

    def free(self, session: SessionId) -> None:
        self.held.pop(session, None)
        self.reserved.pop(session, None)

    def release(self, session: SessionId, sequence: int) -> None:
        self.calls.append(f"release {sequence}")
        self.held[session][sequence] = 0

    def lengths(self, session: SessionId) -> tuple[int, ...]:
        return tuple(self.held[session])

    def fork(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> None:
        self.calls.append(f"fork {tuple(copies)}")
        before = list(self.held[session])
        for destination, source in copies:
            self.held[session][destination] = before[source]

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        self.calls.append(f"truncate {sequence} {length}")
        if length > self.held[session][sequence]:
            raise RequestError("fewer are held")
        self.held[session][sequence] = length

    def keep(self, session: SessionId, sequence: int, first: int, kept: Sequence[int]) -> None:
        self.held[session][sequence] = first + len(kept)

    def begin(self, batch: Sequence[BatchItem]) -> CountingPlan:
        for item in batch:
            for row in item.table.rows():
                if self.held[item.session][row.sequence] != row.first_position:
                    raise RequestError(f"sequence {row.sequence} does not start there")
        return CountingPlan(batch)

    def attend(
        self,
        plan: AttendPlan,
        block: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        return query

    def finish(self, plan: AttendPlan) -> None:
        if isinstance(plan, CountingPlan):
            for item in plan.batch:
                for row in item.table.rows():
                    self.held[item.session][row.sequence] += row.count

    def abort(self, plan: AttendPlan) -> None:
        """Lengths change in `finish` only."""

    def export(
        self, session: SessionId, sequence: int, block: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise RequestError("nothing is held here")

    def expect(
        self, session: SessionId, sequence: int, tokens: int, span: Span | None = None
    ) -> None:
        raise RequestError("nothing is held here")

    def load(
        self,
        session: SessionId,
        sequence: int,
        block: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        raise RequestError("nothing is held here")

    def check_integrity(self) -> None:
        assert self.free_tokens >= 0


class AddingModel:
    """Adds one to every row for each block; fails for the sessions in `failing`.

    A token's row is its id; the likeliest token is the number in the row, and those beside it
    are less likely by 1 each step. A row of NaN gets logits of NaN.
    """

    span = SPAN
    hidden_size = WIDTH
    vocab_size = VOCABULARY
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self) -> None:
        self.failing: dict[SessionId, Exception] = {}
        self.batches: list[list[tuple[SessionId, PackedTable]]] = []
        self.spans: list[Span | None] = []
        self.was_inference = False
        self.embedded: list[list[int]] = []
        self.scored: list[int] = []

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.embedded.append(ids.tolist())
        assert len(ids) == len(positions)
        return ids[:, None].expand(-1, WIDTH).to(self.dtype)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        self.scored.append(len(rows))
        return -(torch.arange(float(VOCABULARY)) - rows[:, :1]).abs()

    def forward(
        self,
        rows: torch.Tensor,
        batch: Sequence[BatchItem],
        pool: KVPool,
        span: Span | None = None,
    ) -> torch.Tensor:
        self.was_inference = torch.is_inference_mode_enabled()
        self.batches.append([(item.session, item.table) for item in batch])
        self.spans.append(span)
        plan = pool.begin(batch)
        for item in batch:
            if item.session in self.failing:
                pool.abort(plan)
                raise self.failing[item.session]
        pool.finish(plan)
        return rows + len(span or self.span)
