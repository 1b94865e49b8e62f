"""Tokens that the servers choose by themselves, as the client follows them.

The last stage tells the client which tokens it chose, and sends those of rows that go on
to the first stage, as a step of the next number. So when an answer comes, the step after
it has begun: the client enters it into its books at once, as if it had sent it. After a
recovery it does send it, and the stages are where they were (see `Step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from bloombee.client.history import History
from bloombee.client.ledger import NO_OPERATIONS, Choices, Ledger, PendingStep
from bloombee.client.payloads import decode_ids, encode_ids
from bloombee.client.split import Part
from bloombee.client.tokens import Emit, Line, Token
from bloombee.core import PackedTable
from bloombee.errors import ProtocolError
from bloombee.protocol.messages import Output, Sampling


class Loop:
    """The lines of one session that are continued together; `emit` takes their tokens."""

    def __init__(self, lines: Sequence[Line], history: History, ledger: Ledger, emit: Emit) -> None:
        self._lines = {line.sequence: line for line in lines}
        self._history = history
        self._ledger = ledger
        self._emit = emit

    @property
    def going(self) -> list[Line]:
        """The lines that are not finished."""
        return [line for line in self._lines.values() if not line.finished]

    @property
    def sequences(self) -> frozenset[int]:
        """Where the lines lie."""
        return frozenset(self._lines)

    def attach(self, step: PendingStep, *, is_whole: bool) -> None:
        """Let `step`, a part of the prompts or the whole, choose for the rows that end in it."""
        if not step.part.kept:
            return
        step.choices = partial(self._choices, step.part)
        step.then = self._take
        if is_whole:
            self._set_off(step)

    def begin(self) -> PendingStep | None:
        """The step that goes on after prompts in several parts, to be sent; None: all finished."""
        going = self.going
        if not going:
            return None
        step = self._following(self._ledger.number(), [line.sequence for line in going])
        self._set_off(step)
        return step

    def _set_off(self, step: PendingStep) -> None:
        longest = max(line.left for line in self.going)
        step.until = self._ledger.reserve(longest - 1)

    def _choices(self, part: Part) -> tuple[Sampling | None, ...]:
        chosen = [self._lines[sequence].now() for sequence in part.table.sequences[: part.kept]]
        return (*chosen, *[None] * (len(part.table.sequences) - part.kept))

    def _take(self, step: PendingStep, output: Output, content: memoryview) -> PendingStep | None:
        """Enter the tokens of an answer; the step that the servers go on with, if any.

        Raises ProtocolError, with nothing changed, when the answer does not fit.
        """
        lines = [self._lines[s] for s in step.part.table.sequences[: step.part.kept]]
        tokens = _read(step, lines, output, content)
        for line, token in zip(lines, tokens, strict=True):
            line.take(token)
        self._emit(tokens)
        going = [line.sequence for line in lines if not line.finished]
        if not step.until or not going:
            return None
        following = self._following(step.number + 1, going)
        following.until, following.sent = step.until, True
        following.trace = step.trace
        return following

    def _following(self, number: int, sequences: Sequence[int]) -> PendingStep:
        """The step `number` with the newest token of each of `sequences`; in the history, too."""
        lengths = [self._history.length(sequence) for sequence in sequences]
        table = PackedTable(tuple(sequences), tuple(lengths), (1,) * len(lengths))
        ids = [self._lines[sequence].chosen[-1] for sequence in sequences]
        self._history.append(table, ids)
        part = Part(0, len(ids), table, "last", len(ids))
        step = PendingStep(number, part, NO_OPERATIONS, "decode", *encode_ids(ids))
        step.choices, step.then = cast(Choices, partial(self._choices, part)), self._take
        return step


def _read(
    step: PendingStep, lines: Sequence[Line], output: Output, content: memoryview
) -> list[Token]:
    rows, table = len(lines), step.part.table
    ids = decode_ids(output.payload, content, rows)
    ends = tuple(
        first + count for first, count in zip(table.first_positions, table.counts, strict=True)
    )
    if output.sequences != table.sequences[:rows] or output.positions != ends[:rows]:
        raise ProtocolError(
            f"step {step.number} asked for tokens of sequences {table.sequences[:rows]} at "
            f"{ends[:rows]}, got {output.sequences} at {output.positions}"
        )
    if len(output.finished) != rows or len(output.logprobs) not in (0, rows):
        raise ProtocolError(f"step {step.number} was answered for some of its {rows} sequences")
    if any(line.left == 1 and not end for line, end in zip(lines, output.finished, strict=True)):
        raise ProtocolError(f"step {step.number} was answered beyond what it asked for")
    logprobs = output.logprobs or (None,) * rows
    alternatives = output.alternatives or ((),) * rows
    read = zip(lines, ids, output.finished, logprobs, alternatives, strict=True)
    return [
        Token(line.row, token, finished, logprob if line.sampling.logprobs else None, others)
        for line, token, finished, logprob, others in read
    ]
