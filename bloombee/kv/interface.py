"""The one interface to KV memory. Only `kv/` knows how keys and values lie.

A session owns sequences 0..n-1; each holds `length` tokens in slots 0..length-1
on every block of the span. Space is reserved in pages of `page_tokens` when a
session opens (so a running session never meets a full pool) and memory is
touched as tokens arrive. One compute thread uses a pool; nothing here locks.

A step goes: `begin` (once; grows the sequences), `attend` (once per block),
then `finish`, or `abort`, which puts every length back. Until then its sequences
can't be changed otherwise: such calls raise RequestError. Several steps may be
under way at once if they share no sequence. Attend under `torch.inference_mode`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import RequestError


@dataclass(frozen=True, slots=True)
class KVShape:
    """Per block: `kv_heads` (K) heads of `head_size` (E) elements, stored in `dtype`."""

    span: Span
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def block_token_bytes(self) -> int:
        """Bytes that one token takes on one block: its key and its value."""
        return 2 * self.kv_heads * self.head_size * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on all blocks of the span."""
        return len(self.span) * self.block_token_bytes

    def blocks(self, span: Span | None = None) -> range:
        """The blocks of `span`, or all. Raises RequestError when some are not held."""
        asked = span or self.span
        if not self.span.covers(asked):
            raise RequestError(f"blocks {asked} are not among the blocks {self.span} held here")
        return range(asked.start, asked.end)

    def layer(self, block: int) -> int:
        """Where `block` stands in the span. Raises RequestError when it is not in it."""
        if block not in self.span:
            raise RequestError(f"block {block} is not among the blocks {self.span} held here")
        return block - self.span.start


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One session's share of a packed batch; its tokens follow the previous item's."""

    session: SessionId
    table: PackedTable


class AttendPlan:
    """What `begin` worked out for one step: opaque outside `kv/`, shared by all blocks."""


class KVPool(ABC):
    """KV of all sessions of one server."""

    page_tokens: int
    shape: KVShape

    @property
    @abstractmethod
    def total_tokens(self) -> int:
        """Capacity in tokens, a multiple of `page_tokens`."""

    @property
    @abstractmethod
    def free_tokens(self) -> int:
        """Tokens in pages that no session has reserved."""

    @abstractmethod
    def reserve(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> None:
        """Reserve `sequences` x `max_length` tokens, rounded up to pages per sequence.

        Sequences that are `released` from the start take nothing.
        Raises KVFull (says how many tokens were free and asked for), RequestError
        when the session exists or a number is not positive. Takes nothing then.
        """

    @abstractmethod
    def free(self, session: SessionId) -> None:
        """Give all of the session's pages back. Unknown sessions are ignored."""

    @abstractmethod
    def release(self, session: SessionId, sequence: int) -> None:
        """Give one finished sequence's pages back; it can't be used again."""

    @abstractmethod
    def lengths(self, session: SessionId) -> tuple[int, ...]:
        """Held tokens of each sequence (0 for released ones)."""

    @abstractmethod
    def fork(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> None:
        """Make each `destination` hold what `source` held; all read before any is written.

        Destinations are distinct. Raises RequestError for unknown sequences.
        """

    @abstractmethod
    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        """Forget tokens from `length` on. Raises RequestError when fewer are held."""

    @abstractmethod
    def keep(self, session: SessionId, sequence: int, first: int, kept: Sequence[int]) -> None:
        """After a verify step: keep tokens `first + i` for i in `kept`, moved together.

        `kept` ascends. The length becomes `first + len(kept)`.
        """

    @abstractmethod
    def begin(self, batch: Sequence[BatchItem]) -> AttendPlan:
        """Place the batch's new tokens: each row starts at its sequence's length.

        Raises RequestError when a row does not start there, would pass the
        session's `max_length`, or names an unknown sequence; nothing changes then.
        """

    @abstractmethod
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
        """Write K and V of the new tokens on `block` (absolute index), then attend.

        A token sees its sequence's tokens before the step and, of the new ones,
        itself and its ancestors (in a chain: all before it). With a sliding
        `window` w it sees only positions greater than its own minus w. Each
        sequence's result depends on nothing but that sequence.
        """

    @abstractmethod
    def finish(self, plan: AttendPlan) -> None:
        """The step is done: its tokens are held."""

    @abstractmethod
    def abort(self, plan: AttendPlan) -> None:
        """The step failed: sequences are as before `begin`."""

    @abstractmethod
    def export(
        self, session: SessionId, sequence: int, block: int, start: int, stop: int
    ) -> tuple[Float[torch.Tensor, "N K E"], Float[torch.Tensor, "N K E"]]:
        """Copies of keys and values in slots `[start, stop)`, N = stop - start."""

    @abstractmethod
    def expect(
        self, session: SessionId, sequence: int, tokens: int, span: Span | None = None
    ) -> None:
        """Have an empty sequence loaded in pieces, on the blocks of `span` (default: all).

        Each `load` then writes behind what its block holds already. The sequence holds
        `tokens` once all these blocks do; `truncate` to 0 gives up. Raises RequestError
        when it is not empty, or may not grow so long.
        """

    @abstractmethod
    def load(
        self,
        session: SessionId,
        sequence: int,
        block: int,
        key: Float[torch.Tensor, "N K E"],
        value: Float[torch.Tensor, "N K E"],
    ) -> None:
        """Write N exported tokens into slots 0..N-1 of an empty sequence, per block.

        The sequence holds them once all blocks of the span are loaded. After `expect`
        they are the block's next N of those expected. Raises RequestError when they
        don't fit.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Verify every invariant of pages and lengths.

        Raises AssertionError that names the first broken one.
        """
