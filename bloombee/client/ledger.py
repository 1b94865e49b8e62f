"""The books of a session: which steps are on their way, and what each stage must hold.

A step is pending from the moment it has a number until its output is here,
whatever becomes of the caller. Pending steps keep their bytes: after a recovery they
are sent again, under the new epoch. Of answered steps only the newest of each
sequence is kept: a stage that has it is up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from bloombee.client.split import Part
from bloombee.compression import Buffer
from bloombee.protocol.messages import (
    ADOPTED_STEP,
    Operations,
    Output,
    Payload,
    Sampling,
    Step,
)

NO_OPERATIONS = Operations()
_NEWEST, _OUTLIER = 0.1, 4.0
Answer = tuple[Output, memoryview]
Choices = Callable[[], tuple[Sampling | None, ...]]
"""How the next tokens of a step's rows are chosen, as of now."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What every message of a session says: its id, its epoch, and the time left in ms."""

    session: bytes
    epoch: int
    deadline_ms: int = 0


@dataclass(slots=True)
class Pace:
    """How long a token takes of late, from sending its step (or its loop's) to the answer."""

    steps: int = 0
    token_s: float = 0.0

    def note(self, seconds: float) -> None:
        """One more; a single pause counts little."""
        self.steps += 1
        if self.steps == 1:
            self.token_s = seconds
        self.token_s += _NEWEST * (min(seconds, _OUTLIER * self.token_s) - self.token_s)


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step with everything that sending it takes; `sent` in this epoch or not.

    With `choices` its answer is tokens. `then` takes the answer as it comes, and returns
    the step that the servers are about to begin themselves, which is pending in its
    place. The last of such steps has at most the number `until`. Those that the client has
    sent, at least once, are `is_ours`.
    """

    number: int
    part: Part
    operations: Operations
    phase: str
    payload: Payload
    content: Buffer
    trace: bool = False
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    sent: bool = False
    is_ours: bool = False
    choices: Choices | None = None
    then: Callable[[PendingStep, Output, memoryview], PendingStep | None] | None = None
    until: int = 0
    entered_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def message(self, standing: Standing, answered: int) -> Step:
        """What is sent before `content`."""
        table = self.part.table
        return Step(
            session=standing.session,
            epoch=standing.epoch,
            step=self.number,
            phase=self.phase,  # pyright: ignore[reportArgumentType] - one of the three phases
            sequences=table.sequences,
            first_positions=table.first_positions,
            counts=table.counts,
            payload=self.payload,
            want=self.part.wants,
            parents=table.parents,
            operations=self.operations,
            trace=self.trace,
            answered=answered,
            deadline_ms=standing.deadline_ms,
            loop=self.until > 0,
            sampling=() if self.choices is None else self.choices(),
        )


class Ledger:
    """Numbers steps and keeps them until they are answered."""

    def __init__(self, sequences: int) -> None:
        self.newest = [0] * sequences
        """Per sequence the newest answered step that changed it."""
        self.numbered = 0
        self.pace = Pace()
        self._pending: dict[int, PendingStep] = {}
        self._replays: dict[int, asyncio.Future[None]] = {}

    def __iter__(self) -> Iterator[PendingStep]:
        """The pending steps, in order."""
        return iter(tuple(self._pending.values()))

    def __bool__(self) -> bool:
        return bool(self._pending)

    def first(self, count: int) -> list[PendingStep]:
        """The `count` pending steps that were numbered first, or all."""
        return list(islice(self._pending.values(), count))

    @property
    def oldest(self) -> PendingStep | None:
        """The pending step that was numbered first."""
        return next(iter(self._pending.values()), None)

    @property
    def answered(self) -> int:
        """All steps up to this one are answered."""
        return next(iter(self._pending), self.numbered + 1) - 1

    def number(self) -> int:
        """The next number of the session's common counter."""
        self.numbered += 1
        return self.numbered

    def reserve(self, count: int) -> int:
        """Leave out the next `count` numbers; returns the last of them."""
        self.numbered += count
        return self.numbered

    def expect_adoption(self) -> None:
        """Stages may begin with what they kept: that takes the first number."""
        self.numbered = ADOPTED_STEP

    def adopt(self, held: Sequence[int]) -> None:
        """Every stage holds so many tokens of each sequence before the first step."""
        self.newest = [ADOPTED_STEP if length else 0 for length in held]

    def enter(self, step: PendingStep) -> None:
        """Count a step as pending."""
        self._pending[step.number] = step

    def expects(self, number: int) -> bool:
        """Whether an answer to this step or replay is still due, or will be."""
        if number in self._pending or number in self._replays:
            return True
        return any(step.number < number <= step.until for step in self._pending.values())

    def take(self, output: Output, content: memoryview) -> PendingStep | None:
        """Enter an answer; the step it belongs to, or None when no such step is pending.

        Raises ProtocolError when it does not fit the step, which stays pending then.
        """
        step = self._pending.get(output.step)
        if step is None:
            return None
        following = None if step.then is None else step.then(step, output, content)
        del self._pending[output.step]
        if step.phase == "decode":
            self.pace.note(asyncio.get_running_loop().time() - step.entered_s)
        if following is not None:
            self.enter(following)
        for sequence in step.part.table.sequences:
            self.newest[sequence] = step.number
        if step.operations is not NO_OPERATIONS:
            self._touch(step)
        if not step.answer.done():
            step.answer.set_result((output, content))
        return step

    def _touch(self, step: PendingStep) -> None:
        operations = step.operations
        named = [target for target, _ in operations.forks]
        named += [sequence for sequence, _ in operations.truncates]
        for sequence in (*named, *operations.releases):
            self.newest[sequence] = step.number

    def unsent(self) -> None:
        """A new epoch: everything pending has to be sent again."""
        for step in self._pending.values():
            step.sent = False

    def overtaken(self, newest_steps: Iterable[Sequence[int]]) -> list[PendingStep]:
        """The loops of which some stage has computed steps beyond the pending one.

        `newest_steps` are those of the stages.
        """
        known = [newest for newest in newest_steps if len(newest) == len(self.newest)]
        return [
            step
            for step in self._pending.values()
            if step.until
            and any(n[s] > step.number for n in known for s in step.part.table.sequences)
        ]

    def renumber(self, step: PendingStep) -> None:
        """Have a loop go on at `step` whatever stages have computed beyond it.

        Under a number that none of them knows, it first cuts its sequences to where it starts.
        """
        table, beyond = step.part.table, step.until - step.number
        del self._pending[step.number]
        step.number = self.number()
        step.until = self.reserve(beyond)
        cuts = zip(table.sequences, table.first_positions, strict=True)
        step.operations = Operations(truncates=tuple(cuts))
        self.enter(step)

    def withdraw(self) -> list[PendingStep]:
        """Give up all pending steps; returns them."""
        given_up = list(self._pending.values())
        self._pending.clear()
        for step in given_up:
            step.answer.cancel()
        return given_up

    def rebase(self, sequences: Iterable[int]) -> None:
        """No stage is up to date in `sequences` any longer, whatever it has taken."""
        number = self.number()
        for sequence in sequences:
            self.newest[sequence] = number

    def is_current(self, newest_steps: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether a stage with these newest steps has all that was answered.

        `lengths` are those that the session has sent: of an empty sequence nothing
        can be missing.
        """
        if len(newest_steps) != len(self.newest):
            return not any(lengths)
        return all(
            has >= wanted
            for has, wanted, length in zip(newest_steps, self.newest, lengths, strict=True)
            if length
        )

    # Replays are numbered alike, and answered without rows.

    def expect_replay(self) -> tuple[int, asyncio.Future[None]]:
        """The number of a replay about to be sent, and what its answer completes."""
        number = self.number()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replays[number] = answer
        return number, answer

    def take_replay(self, number: int) -> bool:
        """Enter the answer to a replay; False when none of this number is due."""
        answer = self._replays.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(None)
        return answer is not None

    def is_replay(self, number: int) -> bool:
        """Whether this is the number of a replay that is due."""
        return number in self._replays

    def drop_replays(self) -> None:
        """No replay is due any longer."""
        for answer in self._replays.values():
            answer.cancel()
        self._replays.clear()
