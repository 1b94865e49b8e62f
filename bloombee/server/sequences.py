"""One session's sequences as of all steps taken, and what may come next in each.

Order matters per sequence only. A step is judged so: an exact repeat (its rows
are the newest steps of their sequences) is dropped; then order, operations,
positions and lengths must fit, or nothing changes. No torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from bloombee.core import StepIdentity
from bloombee.errors import ProtocolError, RequestError
from bloombee.protocol.messages import Operations, Step
from bloombee.server.validation import NO_OPERATIONS, Terms


def identity(message: Step, row: int) -> StepIdentity:
    """What names one row of a step within its session."""
    return StepIdentity(
        message.epoch,
        message.step,
        message.sequences[row],
        message.first_positions[row],
        message.counts[row],
    )


class SequenceBook:
    """Lengths and last steps of one session's sequences, as of all steps taken.

    It runs ahead of the KV itself: a step counts as taken when it is queued.
    """

    def __init__(self, terms: Terms) -> None:
        self._max_length = terms.max_length
        self._lengths = [0] * terms.sequences
        self._last: list[Step | None] = [None] * terms.sequences
        self._released: set[int] = set()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Held tokens of each sequence; 0 for released ones."""
        return tuple(self._lengths)

    def take(self, message: Step) -> bool:
        """Enter a checked step; False when it is an exact repeat, which changes nothing.

        Raises ProtocolError when it is out of order or does not start where its
        sequences end, RequestError when a sequence is unknown, released or would
        grow too long. Nothing changes then.
        """
        self._check_known(message.sequences)
        if self._repeats(message):
            return False
        lengths = self._lengths
        if message.operations != NO_OPERATIONS:
            lengths = self._operate(message.operations)
            self._check_alive(message)
        self._check_positions(message, lengths)
        self._enter(message, lengths)
        return True

    def _check_known(self, sequences: Sequence[int]) -> None:
        if max(sequences) >= len(self._lengths):
            raise RequestError(
                f"sequence {max(sequences)} in a session of {len(self._lengths)} sequences"
            )

    def _repeats(self, message: Step) -> bool:
        """Whether the newest step of each row's sequence is this very step."""
        late = [
            (row, last)
            for row, sequence in enumerate(message.sequences)
            if (last := self._last[sequence]) is not None and last.step >= message.step
        ]
        if not late:
            return False
        same = len(late) == len(message.sequences) and all(
            identity(message, row) == identity(last, last.sequences.index(message.sequences[row]))
            for row, last in late
        )
        if not same:
            row, last = late[0]
            raise ProtocolError(
                f"step {message.step} came after step {last.step} "
                f"of sequence {message.sequences[row]}"
            )
        return True

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
        for sequence, first, count in zip(
            message.sequences, message.first_positions, message.counts, strict=True
        ):
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

    def _enter(self, message: Step, lengths: list[int]) -> None:
        self._lengths = lengths
        self._released.update(message.operations.releases)
        for sequence, first, count in zip(
            message.sequences, message.first_positions, message.counts, strict=True
        ):
            lengths[sequence] = first + count
            self._last[sequence] = message
