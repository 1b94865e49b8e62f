"""KV on CUDA (and any device but CPU): pages anywhere, a table of them per sequence.

Theory of operation. One tensor holds `[2, L, n, P, K, E]`: keys then values, L
blocks, n pages of P tokens. A sequence is a list of pages; the ledger reserves
as many as it may ever need, so none is ever missing. A fork shares pages and
copies nothing; before tokens are written, shared pages under them are copied.
`begin` uploads all indices of a step without waiting; `attend` never waits for
the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from bloombee.core import SessionId, Span
from bloombee.errors import RequestError
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape
from bloombee.kv.ledger import Held, Ledger, StepRow, ensure
from bloombee.kv.page_book import PageBook
from bloombee.kv.paged_attention import (
    MaskedRow,
    VarlenRows,
    attend_masked,
    attend_varlen,
    attend_varlen_plain,
    kernel_fits,
)
from bloombee.kv.visibility import visible

Table = list[int]
Row = StepRow[Table]


class PagedPlan(AttendPlan):
    """A step's rows; where its tokens go; chained rows for the kernel, others by window."""

    def __init__(self, rows: list[Row], writes: torch.Tensor, chained: VarlenRows | None) -> None:
        self.rows = rows
        self.writes = writes
        self.chained = chained
        self.masked: dict[int | None, list[MaskedRow]] = {}
        self.open = True


class PagedPool(KVPool):
    """See the module."""

    def __init__(self, shape: KVShape, ledger: Ledger[Table]) -> None:
        self.shape = shape
        self.page_tokens = ledger.page_tokens
        self._ledger = ledger
        self._book = PageBook(ledger.total_pages)
        size = (2, len(shape.span), ledger.total_pages, self.page_tokens)
        self._pages = torch.zeros(
            (*size, shape.kv_heads, shape.head_size), dtype=shape.dtype, device=shape.device
        )
        self._tokens = self._pages.flatten(2, 3)  # [2, L, n*P, K, E]
        self._kernel = kernel_fits(shape.dtype, shape.head_size, shape.device)
        # On CUDA rows the kernel can't serve are masked; elsewhere its twin serves chains.
        self._chains_by_table = self._kernel or shape.device.type != "cuda"

    @property
    def total_tokens(self) -> int:
        return self._ledger.total_pages * self.page_tokens

    @property
    def free_tokens(self) -> int:
        return self._ledger.free_pages * self.page_tokens

    def reserve(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> None:
        self._ledger.admit(session, sequences, max_length, released)
        self._ledger.open(
            session, max_length, [None if i in released else [] for i in range(sequences)]
        )

    def free(self, session: SessionId) -> None:
        for held in self._ledger.close(session):
            self._book.drop(held.place)

    def release(self, session: SessionId, sequence: int) -> None:
        self._book.drop(self._ledger.release(session, sequence).place)

    def lengths(self, session: SessionId) -> tuple[int, ...]:
        return self._ledger.lengths(session)

    def fork(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> None:
        wanted = self._ledger.forks(session, copies)
        sources = {to: self._ledger.held(session, source) for to, source in wanted.items()}
        tables = {to: self._book.share(source.place) for to, source in sources.items()}
        lengths = {to: source.length for to, source in sources.items()}
        for to, table in tables.items():
            held = self._ledger.held(session, to)
            self._book.drop(held.place)
            held.place, held.length = table, lengths[to]

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        held = self._ledger.shorter(session, sequence, length)
        held.end_import(length)
        self._fit(held, length)

    def keep(self, session: SessionId, sequence: int, first: int, kept: Sequence[int]) -> None:
        held = self._ledger.kept(session, sequence, first, kept)
        moved = [(first + i, first + token) for i, token in enumerate(kept) if i != token]
        if moved:
            self._own(held, moved[0][0], moved[-1][0] + 1)
            to, source = (
                self._upload(self._places(held, slots)) for slots in zip(*moved, strict=True)
            )
            self._tokens[:, :, to] = self._tokens[:, :, source]
        held.length = first + len(kept)
        self._fit(held, held.length)

    def _fit(self, held: Held[Table], tokens: int) -> None:
        """Give back pages behind the last of `tokens`."""
        needed = -(-tokens // self.page_tokens)
        self._book.drop(held.place[needed:])
        del held.place[needed:]

    def _own(self, held: Held[Table], start: int, stop: int) -> None:
        """Make slots `[start, stop)` writable: pages of its own, the missing ones added."""
        table = held.place
        pages = range(start // self.page_tokens, -(-stop // self.page_tokens))
        shared = [i for i in pages if i < len(table) and self._book.holders[table[i]] > 1]
        if shared:
            fresh = self._book.take(len(shared))
            stale = [table[i] for i in shared]
            to, source = (self._upload(np.asarray(each)) for each in (fresh, stale))
            self._pages[:, :, to] = self._pages[:, :, source]
            self._book.drop(stale)
            for i, page in zip(shared, fresh, strict=True):
                table[i] = page
        table += self._book.take(max(0, pages.stop - len(table)))

    def _places(self, held: Held[Table], slots: Sequence[int]) -> NDArray[np.int64]:
        """Where slots lie among the tokens of all pages."""
        page, within = np.divmod(np.asarray(slots, dtype=np.int64), self.page_tokens)
        return np.asarray(held.place, dtype=np.int64)[page] * self.page_tokens + within

    def _upload(self, array: NDArray[Any]) -> torch.Tensor:
        """To the device, without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.shape.device.type == "cuda":
            return tensor.pin_memory().to(self.shape.device, non_blocking=True)
        return tensor.to(self.shape.device)

    def begin(self, batch: Sequence[BatchItem]) -> PagedPlan:
        rows = self._ledger.start(batch)
        for row in rows:
            self._own(row.held, row.first, row.end)
        places = [self._places(row.held, range(row.first, row.end)) for row in rows]
        writes = self._upload(np.concatenate(places))
        chains = [row for row in rows if row.parents is None] if self._chains_by_table else []
        chained = self._chained(chains, whole=len(chains) == len(rows)) if chains else None
        return PagedPlan(rows, writes, chained)

    def _chained(self, rows: list[Row], *, whole: bool) -> VarlenRows:
        counts, ends = [row.count for row in rows], [row.end for row in rows]
        tokens = np.concatenate([np.arange(row.count) + row.offset for row in rows])
        table = np.zeros((len(rows), max(len(row.held.place) for row in rows)), dtype=np.int32)
        for line, row in zip(table, rows, strict=True):
            line[: len(row.held.place)] = row.held.place
        return VarlenRows(
            None if whole else self._upload(tokens),
            self._upload(np.cumsum([0, *counts], dtype=np.int32)),
            self._upload(np.asarray(ends, dtype=np.int32)),
            self._upload(np.cumsum([0, *ends], dtype=np.int32)),
            self._upload(table),
            max(counts),
            max(ends),
        )

    def _masked(self, plan: PagedPlan, window: int | None) -> list[MaskedRow]:
        """The rows that need an explicit mask: trees, and all where nothing reads tables."""
        if window not in plan.masked:
            plan.masked[window] = [
                MaskedRow(
                    row.offset,
                    row.offset + row.count,
                    self._upload(np.asarray(row.held.place, dtype=np.int64)),
                    self._upload(visible(row.first, row.count, row.parents, window)),
                )
                for row in plan.rows
                if row.parents is not None or not self._chains_by_table
            ]
        return plan.masked[window]

    def attend(  # noqa: PLR0913 - what attention takes everywhere
        self,
        plan: AttendPlan,
        block: int,
        query: Float[torch.Tensor, "T H E"],
        key: Float[torch.Tensor, "T K E"],
        value: Float[torch.Tensor, "T K E"],
        *,
        scaling: float,
        window: int | None = None,
    ) -> Float[torch.Tensor, "T H E"]:
        plan, layer = _current(plan), self.shape.layer(block)
        if query.shape[0] != plan.writes.shape[0]:
            raise RequestError(f"{query.shape[0]} tokens, the step has {plan.writes.shape[0]}")
        self._tokens[0, layer][plan.writes] = key
        self._tokens[1, layer][plan.writes] = value
        pages = (self._pages[0, layer], self._pages[1, layer])
        chained = plan.chained
        kernel = attend_varlen if self._kernel else attend_varlen_plain
        if chained is not None and chained.packed is None:
            return kernel(query, pages, chained, scaling, window)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if chained is not None and chained.packed is not None:
            out[chained.packed] = kernel(query[chained.packed], pages, chained, scaling, window)
        for row in self._masked(plan, window):
            part = slice(row.start, row.stop)
            out[part] = attend_masked(query[part], pages, row, scaling)
        return out

    def finish(self, plan: AttendPlan) -> None:
        plan = _current(plan)
        plan.open = False
        self._ledger.settle(plan.rows, keep_tokens=True)

    def abort(self, plan: AttendPlan) -> None:
        plan = _current(plan)
        plan.open = False
        self._ledger.settle(plan.rows, keep_tokens=False)
        for row in plan.rows:
            self._fit(row.held, row.first)

    def export(
        self, session: SessionId, sequence: int, block: int, start: int, stop: int
    ) -> tuple[Float[torch.Tensor, "N K E"], Float[torch.Tensor, "N K E"]]:
        held = self._ledger.exported(session, sequence, start, stop)
        places = self._upload(self._places(held, range(start, stop)))
        keys, values = self._tokens[:, self.shape.layer(block), places]
        return keys, values

    def expect(
        self, session: SessionId, sequence: int, tokens: int, span: Span | None = None
    ) -> None:
        held = self._ledger.expect(session, sequence, tokens, self.shape.blocks(span))
        self._own(held, 0, tokens)

    def load(
        self,
        session: SessionId,
        sequence: int,
        block: int,
        key: Float[torch.Tensor, "N K E"],
        value: Float[torch.Tensor, "N K E"],
    ) -> None:
        layer, tokens = self.shape.layer(block), key.shape[0]
        held, first = self._ledger.loads(session, sequence, block, tokens, self.shape.blocks())
        self._own(held, 0, held.loading_length)
        places = self._upload(self._places(held, range(first, first + tokens)))
        self._tokens[0, layer][places] = key
        self._tokens[1, layer][places] = value
        self._ledger.note_loaded(held, block, tokens)

    def check_integrity(self) -> None:
        self._ledger.check()
        tables: list[Table] = []
        for session, account in self._ledger.accounts.items():
            for held in account.sequences:
                if held is not None:
                    pages = -(-max(held.length, held.loading_length) // self.page_tokens)
                    what = f"{session.hex()}: {len(held.place)} pages for {held.length} tokens"
                    ensure(len(held.place) == pages, what)
                    tables.append(held.place)
        self._book.check(tables)


def _current(plan: AttendPlan) -> PagedPlan:
    if not isinstance(plan, PagedPlan) or not plan.open:
        raise RequestError("the plan is another pool's, or its step has ended; begin a new step")
    return plan


def make_paged(shape: KVShape, pages: int, max_length: int, page_tokens: int) -> PagedPool:
    """A pool of `pages`, allocated at once on the shape's device."""
    return PagedPool(shape, Ledger(pages, page_tokens, max_length))
