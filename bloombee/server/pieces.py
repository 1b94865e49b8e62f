"""What is handed over of a session, cut into pieces that travel and load by themselves.

Pure: sizes in, pieces out. Sender and receiver agree on their order (`kind`,
`sequence`, `block`, `first`), so the receiver can tell a missing one at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bloombee.core import Span

Kind = Literal["kv", "journal", "output"]

PIECE_BYTES = 1 << 20
"""Of one frame: far below any frame limit, and a millisecond or two of the compute thread."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` of `whole` tokens from `first` on, of one sequence (kv: on one block)."""

    kind: Kind
    sequence: int
    block: int
    first: int
    count: int
    whole: int
    count_bytes: int


def kv_pieces(
    lengths: Sequence[int], span: Span, token_bytes: int, most_bytes: int = PIECE_BYTES
) -> Iterator[Piece]:
    """Keys and values of all sequences on `span`, `token_bytes` a token and block."""
    for sequence, length in enumerate(lengths):
        for block in range(span.start, span.end):
            yield from _cut("kv", sequence, block, length, (token_bytes, most_bytes))


def row_pieces(
    kind: Kind, lengths: Sequence[int], row_bytes: int, most_bytes: int = PIECE_BYTES
) -> Iterator[Piece]:
    """Rows of the journal, or of outputs, `row_bytes` each."""
    for sequence, length in enumerate(lengths):
        yield from _cut(kind, sequence, 0, length, (row_bytes, most_bytes))


def batches(pieces: Iterable[Piece], most_bytes: int = PIECE_BYTES) -> Iterator[list[Piece]]:
    """Neighbouring pieces of about `most_bytes` together: many sequences make small ones."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.count_bytes > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.count_bytes
    if batch:
        yield batch


def _cut(
    kind: Kind, sequence: int, block: int, whole: int, sizes: tuple[int, int]
) -> Iterator[Piece]:
    each_bytes, most_bytes = sizes
    step = max(1, most_bytes // each_bytes)
    for first in range(0, whole, step):
        count = min(step, whole - first)
        yield Piece(kind, sequence, block, first, count, whole, count * each_bytes)
