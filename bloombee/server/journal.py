"""What a stage has sent on: per sequence the rows of every token held, bit-exact.

It rebuilds the KV of the next stage when that is lost. Nothing is copied per step:
the journal keeps the outcome tensors themselves and says where in them rows lie.

- Decode steps over the same sequences are collected as a *run*, one tensor a step.
- When a run is full, or its sequences do something else, each of them gets a *segment*
  of it: its row of every step. Small steps are joined into one tensor for that, of
  which each sequence owns every B-th row; large ones stay as they are.
- A sequence of many short segments has them joined.

So a step costs one append, and a row is copied seldom. Segments never change: a fork
copies a list of references.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float

from bloombee.core import PackedTable
from bloombee.errors import ProtocolError
from bloombee.protocol.messages import Operations

RUN_STEPS = 64
SMALL_STEP_BYTES = 16 << 10
"""Below this, what a tensor takes besides its bytes counts."""
MANY_SEGMENTS = 64
LONG_ROWS = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence from position `first` on: every `stride`-th row of `block` from `offset`."""

    block: Float[torch.Tensor, "N D"]
    offset: int
    stride: int
    first: int
    end: int

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The tensors that it keeps alive."""
        return (self.block,)

    def parts(self, start: int, stop: int) -> Sequence[Float[torch.Tensor, "_ D"]]:
        """Views of the rows at positions `[start, stop)`, in order."""
        at = self.offset + (start - self.first) * self.stride
        return (self.block[at : at + (stop - start - 1) * self.stride + 1 : self.stride],)

    def cut(self, length: int) -> Rows:
        """Without the positions from `length` on."""
        return Rows(self.block, self.offset, self.stride, self.first, length)


@dataclass(frozen=True, slots=True)
class Steps:
    """One sequence from position `first` on: row `row` of each of `blocks`."""

    blocks: Sequence[Float[torch.Tensor, "B D"]]
    row: int
    first: int
    end: int

    def parts(self, start: int, stop: int) -> Sequence[Float[torch.Tensor, "_ D"]]:
        """As `Rows.parts`."""
        row = self.row
        steps = self.blocks[start - self.first : stop - self.first]
        return [step[row : row + 1] for step in steps]

    def cut(self, length: int) -> Steps:
        """As `Rows.cut`."""
        return Steps(self.blocks[: length - self.first], self.row, self.first, length)


Segment = Rows | Steps


@dataclass(slots=True, eq=False)
class _Run:
    """Decode steps in a row over the same sequences, `[B, D]` each."""

    sequences: tuple[int, ...]
    first_positions: tuple[int, ...]
    steps: list[torch.Tensor] = field(default_factory=list)

    def segments(self) -> Iterator[Segment]:
        """What each of its sequences has of it, in order."""
        steps, width = self.steps, len(self.sequences)
        block = steps[0]
        joined = len(steps) > 1 and block.nbytes < SMALL_STEP_BYTES
        if joined:
            block = torch.cat(steps)
        for row, first in enumerate(self.first_positions):
            end = first + len(steps)
            if joined or len(steps) == 1:
                yield Rows(block, row, width, first, end)
            else:
                yield Steps(steps, row, first, end)


class Journal:
    """Rows `[0, length)` of each sequence of one session, in the wire's dtype."""

    def __init__(self, sequences: int, width: int, dtype: torch.dtype) -> None:
        self._width = width
        self._dtype = dtype
        self._segments: list[list[Segment]] = [[] for _ in range(sequences)]
        self._runs: list[_Run | None] = [None] * sequences

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence."""
        return tuple(self._length(sequence) for sequence in range(len(self._segments)))

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows, those that sequences share counted for each."""
        return sum(self.lengths) * self._width * self._dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory that it keeps from being freed."""
        storages = {block.untyped_storage().data_ptr(): block for block in self._blocks()}
        return sum(block.untyped_storage().nbytes() for block in storages.values())

    def append(self, table: PackedTable, rows: Float[torch.Tensor, "T D"]) -> None:
        """Add the rows of one step, and keep `rows`: it may not be written into any more.

        Raises ProtocolError when they don't start where their sequences end.
        """
        if table.is_decode:
            self._append_decode(table, rows)
            return
        rows = own(rows)
        for row in table.rows():
            first = row.first_position
            self._settle(row.sequence)
            self._check_follows(row.sequence, first)
            self._add(row.sequence, Rows(rows, row.offset, 1, first, first + row.count))

    def operate(self, operations: Operations) -> None:
        """Do to the rows what the operations of a step do to the KV."""
        sources = {source: self._settled(source) for _, source in operations.forks}
        for destination, source in operations.forks:
            self._settle(destination)
            self._segments[destination] = list(sources[source])
        for sequence, length in operations.truncates:
            self.truncate(sequence, length)
        for sequence in operations.releases:
            self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget rows from `length` on."""
        segments = self._settled(sequence)
        while segments and segments[-1].end > length:
            last = segments.pop()
            if last.first < length:
                segments.append(last.cut(length))

    def rows(self, table: PackedTable) -> Float[torch.Tensor, "T D"]:
        """The rows of `table`'s tokens, packed. Raises ProtocolError when it lacks some."""
        parts: list[torch.Tensor] = []
        for row in table.rows():
            stop = row.first_position + row.count
            if stop > self._length(row.sequence):
                raise ProtocolError(
                    f"rows {row.first_position}:{stop} of sequence {row.sequence} are not in "
                    f"the journal, which holds {self._length(row.sequence)}"
                )
            parts.extend(self._between(row.sequence, row.first_position, stop))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _append_decode(self, table: PackedTable, rows: torch.Tensor) -> None:
        run = self._runs[table.sequences[0]]
        if run is None or run.sequences != table.sequences:
            for sequence in table.sequences:
                self._settle(sequence)
            for sequence, first in zip(table.sequences, table.first_positions, strict=True):
                self._check_follows(sequence, first)
            run = _Run(table.sequences, table.first_positions)
            for sequence in table.sequences:
                self._runs[sequence] = run
        elif table.first_positions[0] != run.first_positions[0] + len(run.steps):
            self._check_follows(table.sequences[0], table.first_positions[0])
        run.steps.append(rows if rows.nbytes < SMALL_STEP_BYTES else own(rows))
        if len(run.steps) >= RUN_STEPS:
            self._settle(run.sequences[0])

    def _check_follows(self, sequence: int, first: int) -> None:
        if first != (length := self._length(sequence)):
            raise ProtocolError(
                f"the journal holds {length} rows of sequence {sequence}, a step starts at {first}"
            )

    def _length(self, sequence: int) -> int:
        if (run := self._runs[sequence]) is not None:
            return run.first_positions[run.sequences.index(sequence)] + len(run.steps)
        segments = self._segments[sequence]
        return segments[-1].end if segments else 0

    def _settled(self, sequence: int) -> list[Segment]:
        self._settle(sequence)
        return self._segments[sequence]

    def _settle(self, sequence: int) -> None:
        """Turn the run that a sequence takes part in, if any, into segments."""
        run = self._runs[sequence]
        if run is None:
            return
        for each in run.sequences:
            self._runs[each] = None
        for each, segment in zip(run.sequences, run.segments(), strict=True):
            self._add(each, segment)

    def _add(self, sequence: int, segment: Segment) -> None:
        segments = self._segments[sequence]
        segments.append(segment)
        if len(segments) >= MANY_SEGMENTS:
            self._join(segments)

    def _join(self, segments: list[Segment]) -> None:
        """Make one of the short segments at the end, in a list of many."""
        start = len(segments)
        while start and segments[start - 1].end - segments[start - 1].first < LONG_ROWS:
            start -= 1
        short = segments[start:]
        if len(short) >= MANY_SEGMENTS // 2:
            first, end = short[0].first, short[-1].end
            block = torch.cat([part for s in short for part in s.parts(s.first, s.end)])
            segments[start:] = [Rows(block, 0, 1, first, end)]

    def _between(self, sequence: int, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Views of the rows `[start, stop)`, in order."""
        for segment in self._segments[sequence]:
            low, high = max(start, segment.first), min(stop, segment.end)
            if low < high:
                yield from segment.parts(low, high)
        if (run := self._runs[sequence]) is not None:
            row = run.sequences.index(sequence)
            first = run.first_positions[row]
            for step in run.steps[max(start - first, 0) : max(stop - first, 0)]:
                yield step[row : row + 1]

    def _blocks(self) -> Iterator[torch.Tensor]:
        for segments in self._segments:
            for segment in segments:
                yield from segment.blocks
        for run in self._runs:
            if run is not None:
                yield from run.steps


def own(rows: Float[torch.Tensor, "T D"]) -> Float[torch.Tensor, "T D"]:
    """`rows` in memory of their own, when they are the lesser part of a larger tensor.

    Else a row of a merged pass would keep all of it alive.
    """
    return rows.clone() if rows.untyped_storage().nbytes() > 2 * rows.nbytes else rows


def whole(length: int, sequence: int) -> PackedTable:
    """The table of all rows of one sequence."""
    return PackedTable((sequence,), (0,), (length,))


def restored(rows: Sequence[Float[torch.Tensor, "_ D"]], width: int, dtype: torch.dtype) -> Journal:
    """A journal that holds `rows`, one tensor a sequence."""
    journal = Journal(len(rows), width, dtype)
    for sequence, held in enumerate(rows):
        if len(held):
            journal.append(whole(len(held), sequence), held)
    return journal
