"""One session's sequences as of all steps taken, and what may come next in each.

Order matters per sequence only. A step is new, or a repeat: one that was taken in
this epoch (and is dropped), or in an earlier one (and is answered from what was
kept). A new step must fit: order, operations, positions and lengths; else nothing
changes. A replay is taken by its positions only. No torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from bloombee.errors import ProtocolError, RequestError
from bloombee.protocol.messages import Operations, Step
from bloombee.server.validation import NO_OPERATIONS, Terms, touched


class Taken(Enum):
    """What a step turned out to be."""

    NEW = "new"
    REPEATED = "repeated"
    EARLIER = "earlier"
    """Applied in an earlier epoch; its client has no answer yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookState:
    """What a book holds, per sequence; `included` are steps whose operations are done."""

    lengths: tuple[int, ...]
    newest_steps: tuple[int, ...]
    released: tuple[bool, ...]
    included: tuple[int, ...] = ()


class SequenceBook:
    """Lengths and newest steps of one session's sequences, as of all steps taken.

    It runs ahead of the KV itself: a step counts as taken when it is queued.
    """

    def __init__(self, terms: Terms) -> None:
        self._max_length = terms.max_length
        self._lengths = [0] * terms.sequences
        self._newest = [0] * terms.sequences
        self._served = [0] * terms.sequences
        """The newest step taken or answered again in this epoch."""
        self._last: list[Step | None] = [None] * terms.sequences
        self._replayed: list[Step | None] = [None] * terms.sequences
        self._released: set[int] = set()
        self._included: set[int] = set()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Held tokens of each sequence; 0 for released ones."""
        return tuple(self._lengths)

    @property
    def newest_steps(self) -> tuple[int, ...]:
        """The newest step that touched each sequence, by tokens or operations."""
        return tuple(self._newest)

    @property
    def included(self) -> tuple[int, ...]:
        """Steps whose operations are done though their tokens haven't come."""
        return tuple(sorted(self._included))

    def begin_epoch(self) -> None:
        """From now on a step taken before is one of an earlier epoch."""
        self._served = [0] * len(self._served)
        self._replayed = [None] * len(self._replayed)

    def export(self) -> BookState:
        """All of it, to go on elsewhere."""
        return BookState(
            lengths=self.lengths,
            newest_steps=self.newest_steps,
            released=tuple(s in self._released for s in range(len(self._lengths))),
            included=self.included,
        )

    def restore(self, state: BookState) -> None:
        """Become what another book was. Raises ProtocolError when it can't be of this session."""
        sizes = {len(state.lengths), len(state.newest_steps), len(state.released)}
        if sizes != {len(self._lengths)} or max(state.lengths) > self._max_length:
            raise ProtocolError("the state handed over is of another session")
        self._lengths = list(state.lengths)
        self._newest = list(state.newest_steps)
        self._released = {s for s, released in enumerate(state.released) if released}
        self._included = set(state.included)

    def operations(self, message: Step) -> Operations:
        """Those of `message` that are still to be done: none of a step that is included."""
        return NO_OPERATIONS if message.step in self._included else message.operations

    def is_new(self, message: Step) -> bool:
        """Whether no sequence of a step has seen it, or a later one."""
        newest = self._newest
        return not any(s < len(newest) and newest[s] >= message.step for s in message.sequences)

    def take(self, message: Step) -> Taken:
        """Enter a checked step; a repeat changes nothing but what counts as repeated.

        Raises ProtocolError when it is out of order or does not start where its
        sequences end, RequestError when a sequence is unknown, released or would
        grow too long. Nothing changes then.
        """
        self._check_known(message.sequences)
        if message.replay:
            return self._take_replay(message)
        number, newest = message.step, self._newest
        if late := [s for s in message.sequences if newest[s] >= number]:
            return self._repeat(message, late)
        lengths, operations = self._lengths, self.operations(message)
        if operations != NO_OPERATIONS:
            lengths = self._operate(operations)
            self._check_alive(message)
        self._check_positions(message, lengths)
        self._enter(message, lengths, self._last)
        self._released.update(operations.releases)
        self._included.discard(number)
        plain = message.operations == NO_OPERATIONS
        for sequence in message.sequences if plain else touched(message):
            newest[sequence] = self._served[sequence] = number
        return Taken.NEW

    def _take_replay(self, message: Step) -> Taken:
        if all(_is_share_of(message, self._replayed[s], s) for s in message.sequences):
            return Taken.REPEATED
        lengths, operations = self._lengths, message.operations
        if operations != NO_OPERATIONS:
            lengths = self._operate(operations)
            self._check_alive(message)
        self._check_positions(message, lengths)
        self._enter(message, lengths, self._replayed)
        self._released.update(operations.releases)
        self._included.update(message.included)
        for sequence in message.sequences:
            self._newest[sequence] = message.as_of
        return Taken.NEW

    def _repeat(self, message: Step, late: Sequence[int]) -> Taken:
        """Judge a step that some of its sequences have seen, or seen a later one."""
        number, served = message.step, self._served
        if len(late) == len(message.sequences):
            if all(served[s] == number for s in late) and self._fits(message):
                return Taken.REPEATED
            if all(served[s] < number for s in late) and self._fits(message):
                for sequence in late:
                    served[sequence] = number
                return Taken.EARLIER
        raise ProtocolError(
            f"step {number} came after step {self._newest[late[0]]} of sequence {late[0]}"
        )

    def _fits(self, message: Step) -> bool:
        """Whether a step can be what its sequences took, which may hold more by now."""
        for sequence, first, count in _rows(message):
            last = self._last[sequence]
            if last is not None and last.step == message.step:
                if not _is_share_of(message, last, sequence):
                    return False
            elif first + count > self._lengths[sequence]:
                return False
        return True

    def _check_known(self, sequences: Sequence[int]) -> None:
        if max(sequences) >= len(self._lengths):
            raise RequestError(
                f"sequence {max(sequences)} in a session of {len(self._lengths)} sequences"
            )

    def _operate(self, operations: Operations) -> list[int]:
        """The lengths after `operations`; raises RequestError for any that can't be done."""
        lengths = list(self._lengths)
        destinations = [destination for destination, _ in operations.forks]
        named = [*destinations, *(source for _, source in operations.forks)]
        named += [*(sequence for sequence, _ in operations.truncates), *operations.releases]
        self._check_known(named)
        if gone := self._released.intersection(named):
            raise RequestError(f"sequence {min(gone)} was released")
        if len(set(destinations)) != len(destinations):
            raise RequestError("a sequence is the destination of two forks in one step")
        for destination, source in operations.forks:
            lengths[destination] = self._lengths[source]
        for sequence, length in operations.truncates:
            if length > lengths[sequence]:
                raise RequestError(
                    f"can't truncate sequence {sequence} to {length}: it holds {lengths[sequence]}"
                )
            lengths[sequence] = length
        for sequence in operations.releases:
            lengths[sequence] = 0
        return lengths

    def _check_alive(self, message: Step) -> None:
        if both := set(message.operations.releases).intersection(message.sequences):
            raise RequestError(f"sequence {min(both)} is released by the step that extends it")

    def _check_positions(self, message: Step, lengths: Sequence[int]) -> None:
        for sequence, first, count in _rows(message):
            if sequence in self._released:
                raise RequestError(f"sequence {sequence} was released")
            if first != lengths[sequence]:
                raise ProtocolError(
                    f"step {message.step} starts at {first} in sequence {sequence}, "
                    f"which holds {lengths[sequence]} tokens"
                )
            if first + count > self._max_length:
                raise RequestError(
                    f"sequence {sequence} would hold {first + count} tokens, the session was "
                    f"opened with max_length {self._max_length}"
                )

    def _enter(self, message: Step, lengths: list[int], taken: list[Step | None]) -> None:
        self._lengths = lengths
        for sequence, first, count in _rows(message):
            lengths[sequence] = first + count
            taken[sequence] = message


def _rows(message: Step) -> Iterable[tuple[int, int, int]]:
    """Sequence, first position and count of each row."""
    return zip(message.sequences, message.first_positions, message.counts, strict=True)


def _is_share_of(message: Step, taken: Step | None, sequence: int) -> bool:
    """Whether `taken` did to `sequence` what `message` does, apart from the epoch."""
    if taken is None or taken.step != message.step or sequence not in taken.sequences:
        return False
    ours, theirs = message.sequences.index(sequence), taken.sequences.index(sequence)
    return (message.first_positions[ours], message.counts[ours]) == (
        taken.first_positions[theirs],
        taken.counts[theirs],
    )
