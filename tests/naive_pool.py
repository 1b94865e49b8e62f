"""The plainest KV there can be: a list of keys and values per sequence, and full masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bloombee.core import PackedTable, SessionId
from bloombee.errors import RequestError
from bloombee.kv.interface import AttendPlan, BatchItem

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class NaivePlan(AttendPlan):
    """What one step adds: sequences by (session, sequence), and the lengths before."""

    batch: Sequence[BatchItem]
    before: dict[tuple[SessionId, int], int] = field(default_factory=dict)


class NaivePool:
    """The part of KVPool that a model uses, by loops and masks of the whole sequence."""

    def __init__(self) -> None:
        self._held: dict[tuple[SessionId, int], int] = {}
        self._kv: dict[tuple[SessionId, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, batch: Sequence[BatchItem]) -> NaivePlan:
        plan = NaivePlan(batch)
        for item in batch:
            for row in item.table.rows():
                key = (item.session, row.sequence)
                held = self._held.get(key, 0)
                if row.first_position != held:
                    raise RequestError(f"{key} holds {held} tokens, not {row.first_position}")
                plan.before[key] = held
        return plan

    def attend(
        self,
        plan: NaivePlan,
        block: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        start = 0
        for item in plan.batch:
            for row in item.table.rows():
                here = slice(start, start + row.count)
                start += row.count
                where = (item.session, row.sequence, block)
                old = self._kv.get(where, (key[:0], value[:0]))
                k = torch.cat([old[0][: row.first_position], key[here]])
                v = torch.cat([old[1][: row.first_position], value[here]])
                self._kv[where] = (k, v)
                positions = torch.from_numpy(_row_table(item.table, row.sequence).positions)
                seen = _mask(row.first_position, row.parents, positions, window)
                out[here] = _attention(query[here], k, v, seen, scaling)
        return out

    def finish(self, plan: NaivePlan) -> None:
        for item in plan.batch:
            for row in item.table.rows():
                self._held[item.session, row.sequence] = row.first_position + row.count

    def abort(self, plan: NaivePlan) -> None:
        """Lengths change in `finish` only, so there is nothing to undo."""

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        self._held[session, sequence] = length


def _row_table(table: PackedTable, sequence: int) -> PackedTable:
    row = next(row for row in table.rows() if row.sequence == sequence)
    return PackedTable((row.sequence,), (row.first_position,), (row.count,), row.parents)


def _mask(
    held: int, parents: Sequence[int] | None, positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Which of held + new tokens each new token sees: `[new, held + new]`."""
    count = len(positions)
    seen = torch.zeros(count, held + count, dtype=torch.bool)
    seen[:, :held] = True
    for token in range(count):
        parent = token - 1 if parents is None else parents[token]
        if parent >= 0:
            seen[token] |= seen[parent]
        seen[token, held + token] = True
    if window is not None:
        of_all = torch.cat([torch.arange(held), positions])
        seen &= of_all[None, :] > positions[:, None] - window
    return seen


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scaling: float
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    k = key.repeat_interleave(groups, dim=1)
    v = value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("the,she->hts", query, k) * scaling
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hts,she->the", scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
