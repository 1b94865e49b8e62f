"""Cutting one large step into parts that fit the servers and overlap in the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bloombee.core import PackedTable

Want = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class Part:
    """The packed tokens `[start, stop)` of a step, sent as a step of their own.

    `wants` is asked of the last stage; of its answer the first `kept` rows belong
    to the whole step's answer.
    """

    start: int
    stop: int
    table: PackedTable
    wants: Want
    kept: int


def part_tokens(tokens: int, stages: int, least: int, limit: int) -> int:
    """How many tokens a part carries: few enough that every stage has one to work on."""
    overlapping = max(least, -(-tokens // (2 * stages)))
    return max(1, min(limit, overlapping if stages > 1 else limit))


def split(table: PackedTable, want: Want, size: int) -> Iterator[Part]:
    """The parts of at most `size` tokens, in order; a draft tree stays whole."""
    tokens = table.tokens
    if tokens <= size or table.parents is not None:
        answered = {"all": tokens, "last": len(table.counts), "none": 0}[want]
        yield Part(0, tokens, table, want, answered)
        return
    ends = set(table.offsets[1:].tolist())
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        part = table.select(start, stop)
        if want == "all":
            yield Part(start, stop, part, want, stop - start)
            continue
        # A sequence that goes on in the next part is last in this one.
        kept = len(part.counts) - (stop not in ends) if want == "last" else 0
        yield Part(start, stop, part, "last" if kept else "none", kept)
