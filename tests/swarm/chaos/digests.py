"""A model made of hashes: any token that is lost, doubled, wrong or misplaced shows.

A row is a whole number below 2^48, as two floats. Each block folds a sequence's
rows into a running digest, one step a token, keeps the digests as its KV, and puts
out the newest. So each output depends on all tokens before it on all blocks, exactly,
whatever was batched, split, replayed or moved; and a token costs a microsecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bloombee.errors import RequestError, Unsupported
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape
from bloombee.kv.ledger import Held, Ledger, StepRow

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bloombee.core import SessionId, Span

WIDTH = 2
VOCABULARY = 4096
PAGE_TOKENS = 4

_HALF = 24
_LOW = (1 << _HALF) - 1
_ALL = (1 << 2 * _HALF) - 1

Chain = dict[int, list[int]]
"""Digests of one sequence, by block."""


def mix(number: int) -> int:
    """Spread a number over 48 bits."""
    number = (number ^ number >> 31) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return (number ^ number >> 32) & _ALL


def embed(ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Rows `[T, 2]` of tokens at their positions."""
    return to_rows([mix(i << 20 | p) for i, p in zip(ids, positions, strict=True)])


def to_rows(numbers: Sequence[int]) -> torch.Tensor:
    """Numbers as rows `[T, 2]`."""
    if not numbers:
        return torch.empty(0, WIDTH)
    return torch.tensor([(n >> _HALF, n & _LOW) for n in numbers], dtype=torch.float32)


def to_numbers(rows: torch.Tensor) -> list[int]:
    """What `to_rows` was given."""
    return [int(high) << _HALF | int(low) for high, low in rows.tolist()]


def fold(digest: int, row: int, block: int) -> int:
    """The digest after one more row."""
    return mix(digest * 31 + row + block * 0x1F123BB5)


def logits(numbers: Sequence[int]) -> torch.Tensor:
    """Scores `[R, VOCABULARY]` of rows with these numbers: all different, the rest mixed up."""
    best = torch.tensor(numbers)[:, None] % VOCABULARY
    places = (torch.arange(VOCABULARY) - best) % VOCABULARY
    return -(places * 1297 % VOCABULARY).float() / 256


class DigestPlan(AttendPlan):
    def __init__(self, rows: list[StepRow[Chain]]) -> None:
        self.rows = rows


class DigestPool(KVPool):
    """Digests as KV, with the books of the real pools."""

    page_tokens = PAGE_TOKENS

    def __init__(self, span: Span, total_tokens: int) -> None:
        self.shape = KVShape(span, 1, WIDTH, torch.float32, torch.device("cpu"))
        self._ledger = Ledger[Chain](total_tokens // PAGE_TOKENS, PAGE_TOKENS, 1 << 20)

    @property
    def total_tokens(self) -> int:
        return self._ledger.total_pages * PAGE_TOKENS

    @property
    def free_tokens(self) -> int:
        return self._ledger.free_pages * PAGE_TOKENS

    def reserve(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> None:
        self._ledger.admit(session, sequences, max_length, released)
        places = [None if i in released else self._empty() for i in range(sequences)]
        self._ledger.open(session, max_length, places)

    def _empty(self) -> Chain:
        return {block: [] for block in self.shape.blocks()}

    def free(self, session: SessionId) -> None:
        self._ledger.close(session)

    def release(self, session: SessionId, sequence: int) -> None:
        self._ledger.release(session, sequence)

    def lengths(self, session: SessionId) -> tuple[int, ...]:
        return self._ledger.lengths(session)

    def max_length(self, session: SessionId) -> int:
        return self._ledger.account(session).max_length

    def fork(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> None:
        wanted = self._ledger.forks(session, copies)
        sources = {to: self._ledger.held(session, source) for to, source in wanted.items()}
        read = {
            to: (held.length, {block: list(chain) for block, chain in held.place.items()})
            for to, held in sources.items()
        }
        for to, (length, place) in read.items():
            target = self._ledger.held(session, to)
            target.length, target.place = length, place

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        held = self._ledger.shorter(session, sequence, length)
        self._cut(held, length)
        held.end_import(length)

    def keep(self, session: SessionId, sequence: int, first: int, kept: Sequence[int]) -> None:
        raise RequestError("no draft trees here")

    def begin(self, batch: Sequence[BatchItem]) -> DigestPlan:
        return DigestPlan(self._ledger.start(batch))

    def extend(self, plan: DigestPlan, block: int, rows: Sequence[int]) -> list[int]:
        """Keep the digests of all new rows on `block`; returns them."""
        made: list[int] = []
        for row in plan.rows:
            chain = row.held.place[block]
            # A session may use some of our blocks only: the others hold nothing.
            digest = chain[row.first - 1] if row.first else 0
            for number in rows[row.offset : row.offset + row.count]:
                digest = fold(digest, number, block)
                chain.append(digest)
                made.append(digest)
        return made

    def attend(  # noqa: PLR0913 - what attention takes everywhere
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
        raise RequestError("digests don't attend: see extend")

    def finish(self, plan: AttendPlan) -> None:
        assert isinstance(plan, DigestPlan)
        self._ledger.settle(plan.rows, keep_tokens=True)

    def abort(self, plan: AttendPlan) -> None:
        assert isinstance(plan, DigestPlan)
        self._ledger.settle(plan.rows, keep_tokens=False)
        for row in plan.rows:
            self._cut(row.held, row.first)

    def export(
        self, session: SessionId, sequence: int, block: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._ledger.exported(session, sequence, start, stop)
        keys = to_rows(held.place[block][start:stop])[:, None]
        return keys, -keys

    def expect(
        self, session: SessionId, sequence: int, tokens: int, span: Span | None = None
    ) -> None:
        self._ledger.expect(session, sequence, tokens, self.shape.blocks(span))

    def load(
        self,
        session: SessionId,
        sequence: int,
        block: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        if not torch.equal(key, -value):
            raise RequestError("keys and values of different tokens")
        held, _ = self._ledger.loads(session, sequence, block, len(key), self.shape.blocks())
        held.place[block] += to_numbers(key[:, 0])
        self._ledger.note_loaded(held, block, len(key))

    def check_integrity(self) -> None:
        self._ledger.check()

    def _cut(self, held: Held[Chain], length: int) -> None:
        for chain in held.place.values():
            del chain[length:]


class DigestModel:
    """Blocks `span` of it. `failures` are raised by the next passes, one each.

    The likeliest token of a row is its number modulo the vocabulary.
    """

    hidden_size = WIDTH
    vocab_size = VOCABULARY
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, span: Span) -> None:
        self.span = span
        self.failures: list[Exception] = []

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.span.start:
            raise Unsupported("these blocks come after the embeddings")
        return embed(ids.tolist(), positions.tolist())

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return logits(to_numbers(rows))

    def forward(
        self,
        rows: torch.Tensor,
        batch: Sequence[BatchItem],
        pool: KVPool,
        span: Span | None = None,
    ) -> torch.Tensor:
        assert isinstance(pool, DigestPool)
        asked = span or self.span
        plan = pool.begin(batch)
        try:
            if self.failures:
                raise self.failures.pop(0)
            numbers = to_numbers(rows)
            for block in range(asked.start, asked.end):
                numbers = pool.extend(plan, block, numbers)
        except BaseException:
            pool.abort(plan)
            raise
        pool.finish(plan)
        return to_rows(numbers)
