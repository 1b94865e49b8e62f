"""The last stage chooses tokens, tells the client, and feeds them to stage 0 (server head).

    client --step n, sampling, loop--> stage 0 .. last --Output n (ids)--> client
                                          ^          |
                                          +----------+  step n+1 (ids, loop), n+2, ...

A loop step is an ordinary step of the next number: who repeats it in the same epoch is
told so, and in a later epoch the last stage answers with the tokens that it kept and
sends them round again, until the loop is where it was. A stage takes each number once
an epoch, so that a loop never runs twice.

How tokens are chosen is per sequence: a client's step says so, each token moves it on,
and any other step over the sequence ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bloombee.core import PackedTable
from bloombee.errors import ProtocolError, StepFailed
from bloombee.models.sampling import Chooser, Chosen
from bloombee.models.scores import later
from bloombee.protocol.messages import Output, Payload, Sampling, Step

KEPT_BYTES = 16 << 20
ROW_BYTES = 256
"""What keeping one token takes, about; as much for each alternative to it."""
NO_VOCABULARY = (1 << 31) - 1
"""As large as ids can be, where the model's vocabulary is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What one step chose: for R sequences a token and the position that it takes.

    `logprobs` says whether any of them is told with its log-probability.
    """

    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    chosen: tuple[Chosen, ...]
    logprobs: bool = False

    @property
    def kept_bytes(self) -> int:
        """What keeping it takes, about."""
        return ROW_BYTES * (1 + sum(1 + len(each.alternatives) for each in self.chosen))

    def output(self, session: bytes, epoch: int, step: int) -> Output:
        """What the client is told; `body` is its payload."""
        told = self.chosen if self.logprobs else ()
        return Output(
            session=session,
            epoch=epoch,
            step=step,
            payload=_ids(len(self.chosen)),
            sequences=self.sequences,
            positions=self.positions,
            finished=tuple(each.finished for each in self.chosen),
            logprobs=tuple(each.logprob for each in told),
            alternatives=tuple(each.alternatives for each in told),
        )

    @property
    def body(self) -> bytes:
        """The ids, `[R, 1]` int32."""
        return _body(each.token for each in self.chosen)

    def following(self, step: Step) -> tuple[Step, bytes] | None:
        """The loop's next step and its ids; None when it ends with this one."""
        going = [row for row, each in enumerate(self.chosen) if not each.finished]
        if not step.loop or not going:
            return None
        following = Step(
            session=step.session,
            epoch=step.epoch,
            step=step.step + 1,
            phase="decode",
            sequences=tuple(self.sequences[row] for row in going),
            first_positions=tuple(self.positions[row] for row in going),
            counts=(1,) * len(going),
            payload=_ids(len(going)),
            trace=step.trace,
            answered=step.answered,
            loop=True,
        )
        return following, _body(self.chosen[row].token for row in going)


@dataclass(slots=True, eq=False)
class _Going:
    """A sequence whose tokens are chosen, and those that were since the client said how."""

    chooser: Chooser
    ids: list[int] = field(default_factory=list[int])

    @property
    def sampling(self) -> Sampling:
        """How the next one is chosen."""
        return later(self.chooser.sampling, self.ids)


class Looping:
    """One session's choosing of tokens on its last stage."""

    def __init__(self, vocab_size: int, limit_bytes: int = KEPT_BYTES) -> None:
        self._vocab_size = vocab_size
        self._limit_bytes = limit_bytes
        self._going: dict[int, _Going] = {}
        self._kept: dict[int, Tokens] = {}
        self._kept_bytes = 0

    @property
    def kept(self) -> Mapping[int, Tokens]:
        """Tokens that the client may not have got yet, by step."""
        return self._kept

    def prepare(self, step: Step) -> tuple[Chooser | None, ...]:
        """How the tokens of a new step are chosen; changes nothing yet.

        Raises RequestError for sampling that makes no sense, ProtocolError for a step that
        goes on with tokens which nobody chose.
        """
        if step.sampling:
            return choosers(step.sampling, self._vocab_size)
        if not step.loop:
            return ()
        known = self._going
        if unknown := [s for s in step.sequences if s not in known]:
            raise ProtocolError(
                f"step {step.step} goes on in sequence {unknown[0]}, for which this stage "
                "has no sampling: send the step with it"
            )
        return tuple(known[sequence].chooser for sequence in step.sequences)

    def begin(self, step: Step, chosen_by: Sequence[Chooser | None]) -> None:
        """Take a new step, of which `prepare` told how its tokens are chosen."""
        operations = step.operations
        changed = [sequence for sequence, _ in (*operations.forks, *operations.truncates)]
        for sequence in (*changed, *operations.releases):
            self._going.pop(sequence, None)
        for row, sequence in enumerate(step.sequences):
            if not chosen_by or (chooser := chosen_by[row]) is None:
                self._going.pop(sequence, None)
            elif step.sampling:
                self._going[sequence] = _Going(chooser)

    def chosen(
        self,
        step: Step,
        table: PackedTable,
        chosen_by: Sequence[Chooser | None],
        told: Sequence[Chosen],
    ) -> Tokens:
        """Keep what a step chose, in the order of its rows that choose."""
        rows = [row for row, by in zip(table.rows(), chosen_by, strict=True) if by is not None]
        if len(rows) != len(told):
            raise StepFailed(f"{len(told)} tokens were chosen for {len(rows)} sequences")
        tokens = Tokens(
            sequences=tuple(row.sequence for row in rows),
            positions=tuple(row.first_position + row.count for row in rows),
            chosen=tuple(told),
            logprobs=any(by is not None and by.sampling.logprobs for by in chosen_by),
        )
        for row, each in zip(rows, told, strict=True):
            if each.finished:
                self._going.pop(row.sequence, None)
            elif (going := self._going.get(row.sequence)) is not None:
                going.ids.append(each.token)
        self.keep(step.step, tokens)
        return tokens

    def keep(self, step: int, tokens: Tokens) -> None:
        """Keep what a step chose until it is answered; the oldest go when they are many."""
        self._kept[step] = tokens
        self._kept_bytes += tokens.kept_bytes
        while self._kept_bytes > self._limit_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def answered(self, step: int) -> None:
        """The client has the outputs of all steps up to this one."""
        while self._kept and (oldest := next(iter(self._kept))) <= step:
            self._drop(oldest)

    def _drop(self, step: int) -> None:
        self._kept_bytes -= self._kept.pop(step).kept_bytes

    def state(self) -> tuple[tuple[int, Sampling], ...]:
        """How tokens would be chosen from here on, by sequence. Quiet holdings only."""
        return tuple((s, going.sampling) for s, going in sorted(self._going.items()))

    def restore(
        self, state: Sequence[tuple[int, Sampling]], kept: Sequence[tuple[int, Tokens]]
    ) -> None:
        """Go on where another server was. Raises RequestError for what makes no sense."""
        for sequence, sampling in state:
            (chooser,) = choosers((sampling,), self._vocab_size)
            if chooser is not None:
                self._going[sequence] = _Going(chooser)
        for step, tokens in kept:
            self.keep(step, tokens)


def choosers(sampling: Sequence[Sampling | None], vocab_size: int) -> tuple[Chooser | None, ...]:
    """A chooser for each row that has sampling; RequestError for any that makes no sense."""
    size = vocab_size or NO_VOCABULARY
    return tuple(None if each is None else Chooser.of(each, size) for each in sampling)


def tokens_of(output: Output, body: memoryview) -> Tokens:
    """The tokens that an Output tells of. Raises ProtocolError when it doesn't add up."""
    ids = np.frombuffer(body, "<i4").tolist() if len(body) == 4 * output.payload.rows else None
    count = len(output.sequences)
    sizes = {len(output.positions), len(output.finished), len(ids or ())}
    optional = {len(output.logprobs), len(output.alternatives)}
    if ids is None or sizes != {count} or not optional <= {0, count}:
        raise ProtocolError(f"the tokens of step {output.step} don't add up")
    logprobs = output.logprobs or (0.0,) * count
    alternatives = output.alternatives or ((),) * count
    fields = zip(ids, logprobs, alternatives, output.finished, strict=True)
    return Tokens(
        sequences=output.sequences,
        positions=output.positions,
        chosen=tuple(Chosen(*each) for each in fields),
        logprobs=bool(output.logprobs),
    )


def _ids(count: int) -> Payload:
    return Payload("ids", "int32", count, 1)


def _body(ids: Iterable[int]) -> bytes:
    return np.fromiter(ids, "<i4").tobytes()
