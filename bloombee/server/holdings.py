"""What a session holds on this stage besides its KV: book, journal, unanswered outputs, loop.

A session that starts anew gets new holdings; what still runs for the old ones ends there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float

from bloombee.compression import torch_dtype
from bloombee.core import PackedTable, SessionId
from bloombee.errors import BloomBeeError, ProtocolError, StepFailed, Unsupported
from bloombee.models.sampling import Chooser
from bloombee.protocol.messages import Operations, Step, WireDtype
from bloombee.server.carried import Carried
from bloombee.server.carried import Terms as CarriedTerms
from bloombee.server.journal import Journal, own, restored, whole
from bloombee.server.looping import Looping, Tokens
from bloombee.server.prompts import Prompts
from bloombee.server.sequences import BookState, SequenceBook
from bloombee.server.validation import NO_OPERATIONS, StepContext
from bloombee.server.work import Outcome

KEPT_BYTES = 64 << 20


class Outputs:
    """Outputs that the client may not have got yet, by step; the oldest go when they are many."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rows: dict[int, Float[torch.Tensor, "R D"]] = {}
        self._answered = 0
        self.held_bytes = 0

    @property
    def kept(self) -> Mapping[int, Float[torch.Tensor, "R D"]]:
        """Rows by step."""
        return self._rows

    def answered(self, step: int) -> None:
        """The client has the outputs of all steps up to this one."""
        if step > self._answered:
            self._answered = step
            for number in [number for number in self._rows if number <= step]:
                self._drop(number)

    def keep(self, step: int, rows: Float[torch.Tensor, "R D"]) -> None:
        """Keep the output of a step until it is answered."""
        if step <= self._answered:
            return
        self._rows[step] = rows = own(rows)
        self.held_bytes += rows.nbytes
        while self.held_bytes > self._limit_bytes and len(self._rows) > 1:
            self._drop(next(iter(self._rows)))

    def _drop(self, step: int) -> None:
        self.held_bytes -= self._rows.pop(step).nbytes


@dataclass(slots=True)
class Spent:
    """What computing so many tokens took."""

    compute_us: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What there is to tell of a step: rows, or the tokens that it chose."""

    outcome: Outcome
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Entered:
    """A new step: what is left of its operations to do, and how the tokens of its rows are chosen.

    `choosers` has one or None for each row; none at all where no tokens are chosen.
    """

    step: Step
    table: PackedTable
    operations: Operations
    choosers: tuple[Chooser | None, ...] = ()


class Holdings:
    """`broken` says why no step can follow, or is empty; such holdings are given up.

    `journal` is used where there is a next stage, `outputs` and `looping` where there is none.
    """

    def __init__(self, context: StepContext, dtype: WireDtype, *, is_last: bool) -> None:
        self.book = SequenceBook(context.terms)
        self.outputs = Outputs()
        self.looping = Looping(context.vocab_size)
        self.journal = (
            None
            if is_last
            else Journal(context.terms.sequences, context.hidden_size, torch_dtype(dtype))
        )
        self.broken = ""
        self.prompts: Prompts | None = None
        """What of its prompts is to be kept for other sessions, if there is any."""
        self._prefill = Spent()
        self._other = Spent()
        self._width = context.hidden_size
        self._last_block = context.last_block
        self._dtype: WireDtype = dtype
        self._computing = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def computing(self) -> int:
        """How many steps were taken and aren't computed yet."""
        return self._computing

    @property
    def replay_s(self) -> float:
        """How long computing all it holds anew takes, as far as its prompts tell."""
        # What was handed over to us as pages has shown nothing but single tokens here.
        spent = self._prefill if self._prefill.tokens else self._other
        return sum(self.book.lengths) * spent.compute_us / max(1, spent.tokens) / 1e6

    async def quiet(self) -> None:
        """Wait until all steps taken are computed."""
        await self._quiet.wait()

    def answered(self, step: int) -> None:
        """The client has the outputs of all steps up to this one."""
        self.outputs.answered(step)
        self.looping.answered(step)

    def prepare(self, step: Step) -> tuple[Chooser | None, ...]:
        """How a step's tokens are chosen, if they are and it is new; changes nothing.

        Raises as `Looping.prepare`, Unsupported where the model doesn't end.
        """
        if self.journal is not None or step.replay or not self.book.is_new(step):
            return ()
        if step.sampling and not self._last_block:
            raise Unsupported("tokens are chosen after the model's last block: end the route there")
        return self.looping.prepare(step)

    def began(self, entered: Entered) -> None:
        """A step was taken."""
        self._computing += 1
        self._quiet.clear()
        if self.journal is None:
            self.looping.begin(entered.step, entered.choosers)

    def computed(self, entered: Entered, outcome: Outcome) -> Told:
        """Keep what came of a step that was taken; returns what to tell of it.

        What fails after another failed, fails because of that.
        """
        was_broken = self.broken
        tokens = self._note(entered, outcome)
        if was_broken and outcome.error is not None:
            return Told(replace(outcome, error=StepFailed(was_broken)))
        if entered.choosers and tokens is None and outcome.error is None:
            return Told(replace(outcome, error=StepFailed(self.broken)))
        return Told(outcome, tokens)

    def _note(self, entered: Entered, outcome: Outcome) -> Tokens | None:
        self._computing -= 1
        if not self._computing:
            self._quiet.set()
        step = entered.step
        spent = self._prefill if step.phase == "prefill" else self._other
        spent.compute_us += outcome.compute_us
        spent.tokens += entered.table.tokens
        if outcome.error is not None or outcome.rows is None:
            # The stages no longer agree on what the session holds.
            self.broken = self.broken or f"step {step.step} failed ({outcome.error})"
            return None
        try:
            return self._keep(entered, outcome, outcome.rows)
        except BloomBeeError as error:
            self.broken = self.broken or f"after step {step.step}: {error}"
            return None

    def _keep(self, entered: Entered, outcome: Outcome, rows: torch.Tensor) -> Tokens | None:
        step, operations = entered.step, entered.operations
        if self.journal is not None:
            if operations != NO_OPERATIONS:
                self.journal.operate(operations)
            self.journal.append(entered.table, rows)
        elif entered.choosers:
            return self.looping.chosen(step, entered.table, entered.choosers, outcome.chosen)
        elif not step.replay:
            self.outputs.keep(step.step, rows)
        return None

    def again(self, step: Step, table: PackedTable) -> Told:
        """What came of a step that was computed in an earlier epoch.

        Raises StepFailed when it isn't held any more; nothing can follow then.
        """
        try:
            if self.journal is not None:
                return Told(Outcome(self.journal.rows(table)))
            if step.sampling or step.loop:
                return Told(Outcome(None), self.looping.kept[step.step])
            return Told(Outcome(self.outputs.kept[step.step]))
        except (ProtocolError, KeyError):
            self.broken = f"the output of step {step.step} is not held any more"
            raise StepFailed(self.broken) from None

    def carry(self) -> Carried:
        """All of it, for another server. Quiet holdings only."""
        state, journal = self.book.export(), self.journal
        return Carried(
            lengths=state.lengths,
            newest_steps=state.newest_steps,
            released=state.released,
            included=state.included,
            journal=None if journal is None else tuple(self._rows_of(journal)),
            outputs=tuple(self.outputs.kept.items()),
            tokens=tuple(self.looping.kept.items()),
            sampling=self.looping.state(),
        )

    def _rows_of(self, journal: Journal) -> list[torch.Tensor]:
        empty = torch.empty(0, self._width, dtype=torch_dtype(self._dtype))
        return [
            journal.rows(whole(length, sequence)) if length else empty
            for sequence, length in enumerate(journal.lengths)
        ]

    def restore(self, carried: Carried) -> None:
        """Become what another server held.

        Raises ProtocolError when it doesn't fit, RequestError when its sampling makes no sense.
        """
        if (carried.journal is None) != (self.journal is None):
            raise ProtocolError("the journal handed over is of another place in the route")
        if carried.journal is not None:
            if tuple(map(len, carried.journal)) != carried.lengths:
                raise ProtocolError("the journal handed over is not as long as the sequences")
            self.journal = restored(carried.journal, self._width, torch_dtype(self._dtype))
        self.book.restore(
            BookState(
                lengths=carried.lengths,
                newest_steps=carried.newest_steps,
                released=carried.released,
                included=carried.included,
            )
        )
        for step, rows in carried.outputs:
            self.outputs.keep(step, rows)
        self.looping.restore(carried.sampling, carried.tokens)


def carried_terms(session: SessionId, context: StepContext, dtype: WireDtype) -> CarriedTerms:
    """What a hand-over has to know of a session."""
    return CarriedTerms(
        session=session,
        span=context.terms.span,
        sequences=context.terms.sequences,
        max_length=context.terms.max_length,
        hidden_size=context.hidden_size,
        wire_dtype=dtype,
    )
