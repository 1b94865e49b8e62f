"""KV on CPU: each sequence owns a slot of consecutive tokens, attended in place.

Theory of operation. All slots have one stride, so rows in adjacent slots of any
sessions form one strided batch (`layout`, `contiguous_attention`). Memory is
committed by writing and returned by `free` (`arena`). What lies beyond a
sequence's end is zero at all times: shrinking clears it, so masked reads are
finite and a weight of zero times them is zero.

A fork moves sequences between slots before it copies: whoever continues an old
content alone keeps that slot, and only tokens after the last common one are
copied. `common[i, j]` counts the leading tokens sequences i and j surely share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from bloombee.core import SessionId, Span
from bloombee.errors import KVFull, RequestError
from bloombee.kv.arena import Arena, ArenaShape, map_slots, slot_tokens
from bloombee.kv.contiguous_attention import Layout, attend_layout
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape
from bloombee.kv.layout import Heads, build_layout
from bloombee.kv.ledger import Held, Ledger, StepRow, ensure
from bloombee.kv.slots import Slots

Common = NDArray[np.int64]

MAX_SLOTS = 4096
ADDRESS_BYTES = 8 << 40
"""Address space that one pool maps at most: a processor offers 128 TiB to all of a process."""


class ContiguousPlan(AttendPlan):
    """Rows of the step, where their tokens are written, and layouts by kind of layer."""

    def __init__(self, rows: list[StepRow[int]], writes: torch.Tensor) -> None:
        self.rows = rows
        self.writes = writes
        self.tokens = writes.shape[0]
        self.layouts: dict[tuple[int, int | None], Layout] = {}
        self.open = True


class ContiguousPool(KVPool):
    """See the module; `slots` bounds how many sequences there may be at once."""

    def __init__(self, shape: KVShape, ledger: Ledger[int], arena: Arena) -> None:
        self.shape = shape
        self.page_tokens = ledger.page_tokens
        self._ledger = ledger
        self._arena = arena
        self._slots = Slots(arena.shape.slots)
        self._common: dict[SessionId, Common] = {}

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
        live = sequences - len(set(released))
        slots = self._slots.take(live)
        if slots is None:
            raise KVFull(
                f"{live} sequences asked for, {len(self._slots.free)} of {self._slots.count} "
                "slots are free; wait for a session to end"
            )
        places = iter(slots)
        self._ledger.open(
            session, max_length, [None if i in released else next(places) for i in range(sequences)]
        )

    def free(self, session: SessionId) -> None:
        for held in self._ledger.close(session):
            self._return(held)
        self._common.pop(session, None)

    def release(self, session: SessionId, sequence: int) -> None:
        self._return(self._ledger.release(session, sequence))
        self._forget_common(session, sequence, 0)

    def _return(self, held: Held[int]) -> None:
        self._arena.release(held.place, held.length or held.loading_length)
        self._slots.give((held.place,))

    def lengths(self, session: SessionId) -> tuple[int, ...]:
        return self._ledger.lengths(session)

    def fork(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> None:
        wanted = self._ledger.forks(session, copies)
        if not wanted:
            return
        sequences = self._ledger.account(session).sequences
        count = len(sequences)
        source = [wanted.get(index, index) for index in range(count)]
        lengths = np.asarray(self.lengths(session))
        common = self._common.get(session, np.zeros((count, count), dtype=np.int64))
        np.fill_diagonal(common, lengths)
        before = {i: held.place for i, held in enumerate(sequences) if held is not None}
        heirs = _heirs(source, before)
        spare = [index for index in before if index not in source]
        for index in before:
            held, origin = self._ledger.held(session, index), source[index]
            held.length = int(lengths[origin])
            if heirs[origin] == index:
                held.place = before[origin]
                continue
            nearest = max(spare, key=lambda old: common[old, origin])
            spare.remove(nearest)
            held.place = before[nearest]
            shared = int(common[nearest, origin])
            self._copy(before[origin], held.place, range(shared, held.length))
            self._arena.clear(held.place, held.length, int(lengths[nearest]))
        self._common[session] = common[np.ix_(source, source)]

    def _copy(self, source: int, destination: int, tokens: range) -> None:
        part = slice(tokens.start, tokens.stop)
        self._arena.slot(destination)[..., part, :] = self._arena.slot(source)[..., part, :]

    def _forget_common(self, session: SessionId, sequence: int, length: int) -> None:
        common = self._common.get(session)
        if common is not None:
            np.minimum(common[sequence], length, out=common[sequence])
            np.minimum(common[:, sequence], length, out=common[:, sequence])

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        held = self._ledger.shorter(session, sequence, length)
        self._arena.clear(held.place, length, held.length or held.loading_length)
        held.end_import(length)
        self._forget_common(session, sequence, length)

    def keep(self, session: SessionId, sequence: int, first: int, kept: Sequence[int]) -> None:
        held = self._ledger.kept(session, sequence, first, kept)
        stay = next((i for i, token in enumerate(kept) if i != token), len(kept))
        end = first + len(kept)
        if moved := list(kept[stay:]):
            slot = self._arena.slot(held.place)
            slot[..., first + stay : end, :] = slot[..., [first + token for token in moved], :]
        self._arena.clear(held.place, end, held.length)
        held.length = end
        self._forget_common(session, sequence, first + stay)

    def begin(self, batch: Sequence[BatchItem]) -> ContiguousPlan:
        rows = self._ledger.start(batch)
        shape = self._arena.shape
        slots = np.concatenate([np.full(row.count, row.held.place) for row in rows])
        tokens = np.concatenate([np.arange(row.first, row.end) for row in rows])
        heads = np.arange(shape.kv_heads)
        writes = (slots[:, None] * shape.kv_heads + heads) * shape.tokens + tokens[:, None]
        return ContiguousPlan(rows, torch.from_numpy(writes))

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
        plan, layer = _own(plan), self.shape.layer(block)
        if query.shape[0] != plan.tokens:
            raise RequestError(f"{query.shape[0]} tokens, the step has {plan.tokens}")
        self._arena.flat_keys[layer][plan.writes] = key
        self._arena.flat_values[layer][plan.writes] = value
        kind = (query.shape[1], window)
        layout = plan.layouts.get(kind)
        if layout is None:
            layout = plan.layouts[kind] = build_layout(plan.rows, self._arena.shape, Heads(*kind))
        return attend_layout(self._arena, layer, layout, query, scaling)

    def finish(self, plan: AttendPlan) -> None:
        plan = _own(plan)
        plan.open = False
        self._ledger.settle(plan.rows, keep_tokens=True)

    def abort(self, plan: AttendPlan) -> None:
        plan = _own(plan)
        plan.open = False
        self._ledger.settle(plan.rows, keep_tokens=False)
        for row in plan.rows:
            self._arena.clear(row.held.place, row.first, row.end)

    def export(
        self, session: SessionId, sequence: int, block: int, start: int, stop: int
    ) -> tuple[Float[torch.Tensor, "N K E"], Float[torch.Tensor, "N K E"]]:
        held = self._ledger.exported(session, sequence, start, stop)
        kept = self._arena.slot(held.place)[
            :, self.shape.layer(block), :, start:stop
        ]  # [2, K, N, E]
        keys, values = kept.transpose(1, 2).contiguous()
        return keys, values

    def expect(
        self, session: SessionId, sequence: int, tokens: int, span: Span | None = None
    ) -> None:
        self._ledger.expect(session, sequence, tokens, self.shape.blocks(span))

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
        slot = self._arena.slot(held.place)[:, layer, :, first : first + tokens]
        slot[0] = key.transpose(0, 1)
        slot[1] = value.transpose(0, 1)
        self._ledger.note_loaded(held, block, tokens)

    def check_integrity(self) -> None:
        self._ledger.check()
        taken: set[int] = set()
        for session, account in self._ledger.accounts.items():
            for held in account.sequences:
                if held is not None:
                    ensure(held.place not in taken, f"slot {held.place} has two owners")
                    taken.add(held.place)
                    self._check_tail(held)
            self._check_common(session)
        everything = set(range(self._slots.count))
        ensure(taken == everything - self._slots.free, "a slot is both free and owned, or lost")

    def _check_tail(self, held: Held[int]) -> None:
        if not held.in_flight:
            end = max(held.length, held.loading_length)
            tail = self._arena.slot(held.place)[..., end : end + 128, :]
            ensure(not bool(tail.any()), f"slot {held.place}: stale data after token {end}")

    def _check_common(self, session: SessionId) -> None:
        common = self._common.get(session)
        if common is None:
            return
        places = [held and held.place for held in self._ledger.account(session).sequences]
        for i, j in zip(*np.nonzero(np.triu(common, 1)), strict=True):
            left, right = places[i], places[j]
            ensure(left is not None and right is not None, f"released {i} or {j} shares tokens")
            part = slice(0, int(common[i, j]))
            pair = [self._arena.slot(int(place or 0))[..., part, :] for place in (left, right)]
            ensure(torch.equal(*pair), f"sequences {i} and {j} differ within {part.stop} tokens")


def _heirs(source: Sequence[int], live: dict[int, int]) -> dict[int, int]:
    """For each content that lives on, who keeps its slot: its old owner if it may."""
    heirs: dict[int, int] = {}
    for index in live:
        if source[index] not in heirs or source[index] == index:
            heirs[source[index]] = index
    return heirs


def _own(plan: AttendPlan) -> ContiguousPlan:
    if not isinstance(plan, ContiguousPlan) or not plan.open:
        raise RequestError("the plan is another pool's, or its step has ended; begin a new step")
    return plan


def make_contiguous(
    shape: KVShape, pages: int, max_length: int, page_tokens: int
) -> ContiguousPool:
    """A pool of `pages`; its address space is slots x max_length, far more than the pages."""
    blocks, heads, size = len(shape.span), shape.kv_heads, shape.head_size
    one = ArenaShape(
        blocks, 1, heads, slot_tokens(heads * size, max_length, shape.dtype), size, shape.dtype
    )
    slots = max(1, min(pages, MAX_SLOTS, ADDRESS_BYTES // one.total_bytes))
    arena = map_slots(one, slots)
    return ContiguousPool(shape, Ledger(pages, page_tokens, max_length), arena)
