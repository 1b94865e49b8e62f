"""Which rows rebuild the stages that hold nothing: pure, over what was sent and what is held.

Neighbouring empty stages are one gap. The stage before a gap sends the rows of its
journal again; before the first stage there is only the client, which has the ids.
What the stage before has applied of steps without an answer is left out: these steps
come again themselves, and only their operations are done already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bloombee.client.ledger import NO_OPERATIONS, PendingStep
from bloombee.client.split import Part, part_tokens, split
from bloombee.core import PackedTable


@dataclass(frozen=True, slots=True)
class Gap:
    """The stages `first` to `last` of the route hold nothing."""

    first: int
    last: int

    @property
    def stages(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Rows:
    """The first `lengths[s]` tokens of each sequence.

    They show the operations of the steps `included` as done; `released` are freed.
    """

    lengths: tuple[int, ...]
    included: tuple[int, ...]
    released: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many rows these are."""
        return sum(self.lengths)

    def parts(self, stages: int, least: int, limit: int) -> Iterator[Part]:
        """The rows cut to steps for so many stages, of at most `limit` tokens."""
        live = [sequence for sequence, length in enumerate(self.lengths) if length]
        if not live:
            return
        table = PackedTable(
            tuple(live), (0,) * len(live), tuple(self.lengths[sequence] for sequence in live)
        )
        yield from split(table, "none", part_tokens(table.tokens, stages, least, limit))

    def whole_parts(self, starts: Sequence[Sequence[int]], limit: int) -> Iterator[Part]:
        """The rows cut where the steps began that brought them, in parts of `limit` tokens.

        `starts` are those of each sequence. A part of one sequence is never cut: so every
        row is rotated by the length that it was computed with at first.
        """
        for depth in range(max((len(each) for each in starts), default=0)):
            pieces: list[tuple[int, int, int]] = []
            for sequence, begins in enumerate(starts):
                if depth >= len(begins) or begins[depth] >= self.lengths[sequence]:
                    continue
                ends = min([*begins[depth + 1 : depth + 2], self.lengths[sequence]])
                piece = (sequence, begins[depth], ends - begins[depth])
                if pieces and sum(count for _, _, count in pieces) + piece[2] > limit:
                    yield _part(pieces)
                    pieces = []
                pieces.append(piece)
            if pieces:
                yield _part(pieces)


def _part(pieces: Sequence[tuple[int, int, int]]) -> Part:
    sequences, firsts, counts = zip(*pieces, strict=True)
    table = PackedTable(sequences, firsts, counts)
    return Part(0, table.tokens, table, "none", 0)


def gaps(is_empty: Sequence[bool]) -> list[Gap]:
    """Runs of stages that are empty, in order."""
    found: list[Gap] = []
    for stage, empty in enumerate(is_empty):
        if empty and found and found[-1].last == stage - 1:
            found[-1] = Gap(found[-1].first, stage)
        elif empty:
            found.append(Gap(stage, stage))
    return found


def rows_of_stage(
    held: Sequence[int],
    newest_steps: Sequence[int],
    pending: Iterable[PendingStep],
    released: Iterable[int] = (),
) -> Rows:
    """What a stage replays that holds `held` tokens, given its newest steps.

    `released` are all sequences that were freed, by pending steps too.
    """
    steps = list(pending)
    applied = [s for s in steps if newest_steps[s.part.table.sequences[0]] >= s.number]
    later = [s for s in steps if s not in applied]
    freed = set(released) - {each for step in later for each in step.operations.releases}
    return _rows(held, applied, freed)


def rows_of_client(
    lengths: Sequence[int], pending: Iterable[PendingStep], released: Iterable[int] = ()
) -> Rows:
    """What the client replays: its history counts every pending step as applied."""
    return _rows(lengths, list(pending), released)


def _rows(lengths: Sequence[int], applied: Sequence[PendingStep], released: Iterable[int]) -> Rows:
    kept = list(lengths)
    for step in reversed(applied):
        table = step.part.table
        for sequence, first in zip(table.sequences, table.first_positions, strict=True):
            kept[sequence] = first
    included = tuple(step.number for step in applied if step.operations != NO_OPERATIONS)
    return Rows(tuple(kept), included, tuple(sorted(released)))
