"""How a stage takes steps: from a stream, through the checks, to the compute thread.

Whoever feeds the session (its client, the stage before, the last stage in a loop) has a
task that reads and calls `offer`. A step that can go on at once does so without a task switch; what
has to wait (for room, for its peer's turn, for pages) lines up in the session's
backlog, so that reading goes on: signs of life come on the same stream. What comes
of a step goes to the session's outbox, and `sending` takes it from there.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int

from bloombee.compression import row_bytes, torch_dtype
from bloombee.core import PeerId, Phase
from bloombee.errors import (
    BloomBeeError,
    DeadlineExceeded,
    ProtocolError,
    RequestError,
    StepFailed,
)
from bloombee.protocol.messages import Acknowledged, Replay, Step
from bloombee.server.admission import Admission
from bloombee.server.executor import Executor
from bloombee.server.holdings import Entered, Told
from bloombee.server.live_rows import LiveRows
from bloombee.server.looping import choosers
from bloombee.server.payloads import Payloads
from bloombee.server.prefixes import Prefixes
from bloombee.server.sequences import Taken
from bloombee.server.sessions import Arrived, Asked, Finished, Refused, Session
from bloombee.server.tasks import BackgroundTasks
from bloombee.server.throttle import Throttle
from bloombee.server.token_rules import check_tokens
from bloombee.server.traces import Times
from bloombee.server.validation import (
    NO_OPERATIONS,
    check_replay,
    check_step,
    touched,
)
from bloombee.server.work import Outcome, StepWork
from bloombee.telemetry import Registry, loop_us, now_us

REFUSAL_S = 0.05
"""Before a step's time is up, for the word that its KV can't be brought back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What steps pass through on `peer`."""

    peer: PeerId
    admission: Admission
    executor: Executor
    live_rows: LiveRows
    payloads: Payloads
    prefixes: Prefixes
    throttle: Throttle
    telemetry: Registry
    tasks: BackgroundTasks


class Steps:
    """Takes steps into the compute thread."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._payloads = parts.payloads
        self._taken = parts.telemetry.counter("steps")
        self._tokens = parts.telemetry.counter("tokens")
        self._repeats = parts.telemetry.counter("repeats")
        self._again = parts.telemetry.counter("steps_sent_again")
        self._refused = parts.telemetry.counter("refused_steps")

    @property
    def taken(self) -> int:
        """How many steps were computed, or are about to be."""
        return self._taken.value

    def offer(
        self,
        session: Session,
        step: Step,
        payload: memoryview,
        feeder: PeerId,
        *,
        looped: bool = False,
    ) -> None:
        """Take one step of `feeder`, now or when its turn comes. A bad one is answered.

        `looped`: `feeder` is the session's last stage.
        """
        now_s = session.clock()
        later_s = now_s + self._parts.throttle.delay_s(feeder, now_s)
        expires_s = _expiry(step, now_s)
        times = Times(feeder, now_us())
        if step.sent_us:
            times.is_timed, times.wire_us = True, max(0, loop_us() - step.sent_us)
        self._admit(session, Arrived(step, payload, times, later_s, expires_s, looped), now_s)

    def loop(self, session: Session, step: Step, ids: bytes, expires_s: float) -> None:
        """Take a step of a loop that begins and ends here."""
        now_s = session.clock()
        times = Times(self._parts.peer, now_us(), is_timed=True)
        arrived = Arrived(step, memoryview(ids), times, now_s, expires_s, looped=True)
        self._admit(session, arrived, now_s)

    def _admit(self, session: Session, arrived: Arrived, now_s: float) -> None:
        step, payload, window = arrived.step, arrived.payload, session.window
        window.arrived()
        window.read(payload.nbytes)
        if (
            session.backlog
            or arrived.not_before_s > now_s
            or not self._payloads.is_quick(step.payload, payload)
            or self._parts.admission.is_away(session.id)
            or not window.try_enter(payload.nbytes)
        ):
            self._line_up(session, arrived)
        else:
            self._take(session, arrived)

    def replay(self, session: Session, message: Replay) -> None:
        """Have rows of the journal sent on. A bad request is answered."""
        now_s = session.clock()
        session.window.arrived()
        try:
            table = check_replay(message, session.context, is_last=session.is_last)
            self._check_going(session)
        except BloomBeeError as error:
            self._refuse(session, message, error)
            return
        count_bytes = table.tokens * row_bytes(session.context.hidden_size, session.wire_dtype)
        asked = Asked(message, table, count_bytes, _expiry(message, now_s))
        session.window.read(asked.payload_bytes)
        session.outbox.put_nowait(asked)

    def _line_up(self, session: Session, arrived: Arrived) -> None:
        session.backlog.append(arrived)
        if len(session.backlog) == 1:
            pump = self._parts.tasks.start(self._pump(session), "backlog")
            session.keep_task(pump)

    async def _pump(self, session: Session) -> None:
        """Take what waits, in order, each when its turn has come."""
        backlog = session.backlog
        while backlog:
            arrived = backlog[0]
            try:
                async with (
                    asyncio.timeout_at(_deadline(arrived.expires_s)),
                    self._kept(session, arrived),
                ):
                    rows = await self._turn(session, arrived)
                    await session.window.enter(arrived.payload.nbytes)
                    if session.backlog is not backlog:  # a later epoch has begun meanwhile
                        return
                    self._take(session, arrived, rows)
            except TimeoutError:
                error = DeadlineExceeded(_too_late(arrived.step))
                self._give_up(session, arrived, error)
            except BloomBeeError as error:
                self._give_up(session, arrived, error)
            backlog.popleft()

    async def _turn(self, session: Session, arrived: Arrived) -> torch.Tensor:
        """Wait until a step may be computed; what it carries."""
        now_s = session.clock()
        if arrived.not_before_s > now_s:
            await asyncio.sleep(arrived.not_before_s - now_s)
        check_step(arrived.step, session.context)
        began_us = now_us()
        rows = await self._payloads.decode(arrived.step.payload, arrived.payload)
        arrived.times.decode_us = now_us() - began_us
        return rows

    def _kept(self, session: Session, arrived: Arrived) -> AbstractAsyncContextManager[None]:
        """The session's KV is in the pool inside, brought back if it was parked.

        Gives up early enough to say so.
        """
        left_s = arrived.expires_s - session.clock()
        return self._parts.admission.use(session.id, left_s - REFUSAL_S)

    def _give_up(self, session: Session, arrived: Arrived, error: BloomBeeError) -> None:
        session.window.forget(arrived.payload.nbytes)
        self._refuse(session, arrived.step, error)

    def _refuse(
        self, session: Session, step: Step | Replay, error: BloomBeeError, payload_bytes: int = 0
    ) -> None:
        self._refused.add()
        session.outbox.put_nowait(Refused(step, error, payload_bytes))

    def _take(self, session: Session, arrived: Arrived, rows: torch.Tensor | None = None) -> None:
        try:
            self._queue(session, arrived, rows)
        except BloomBeeError as error:
            self._refuse(session, arrived.step, error, arrived.payload.nbytes)

    def _queue(self, session: Session, arrived: Arrived, rows: torch.Tensor | None) -> None:
        """Hand a step to the compute thread, or answer a repeat; raises what is wrong with it."""
        step, held = arrived.step, session.held
        if step.session != session.id:
            raise ProtocolError("the step is of another session than its stream")
        table = check_step(step, session.context)
        check_tokens(step, session.context, looped=arrived.looped)
        self._check_going(session)
        if session.is_last and step.replay and step.until > session.context.terms.span.end:
            raise ProtocolError(f"replay up to block {step.until} came to the last stage")
        if session.clock() >= arrived.expires_s:
            raise DeadlineExceeded(_too_late(step))
        if rows is None:
            began_us = now_us()
            rows = self._payloads.decode_now(step.payload, arrived.payload)
            arrived.times.decode_us = now_us() - began_us
        if step.payload.content == "ids":
            rows = _checked_ids(step, rows, session.context.vocab_size)
        if step.sampling and session.is_first:  # the last stage would find it out too late
            choosers(step.sampling, session.context.vocab_size)
        held.answered(step.answered)
        entered = Entered(step, table, held.book.operations(step), held.prepare(step))
        taken = held.book.take(step)
        if taken is Taken.NEW:
            self._submit(session, arrived, entered, rows)
        elif taken is Taken.EARLIER:
            self._again.add()
            self._finish(session, arrived, held.again(step, table))
        else:
            self._repeats.add()
            session.window.leave(arrived.payload.nbytes)
            session.outbox.put_nowait(Acknowledged(session.id, session.epoch, step.step))

    def _check_going(self, session: Session) -> None:
        """Raise why the session takes no step now, if it doesn't."""
        if session.halted is not None:
            raise type(session.halted)(str(session.halted))
        if session.held.broken:
            raise StepFailed(f"{session.held.broken}: this stage starts anew in the next epoch")

    def _finish(self, session: Session, arrived: Arrived, told: Told) -> None:
        size, times = arrived.payload.nbytes, arrived.times
        times.ready_us = now_us()
        session.outbox.put_nowait(Finished(arrived.step, told, size, times, arrived.expires_s))

    def _submit(
        self,
        session: Session,
        arrived: Arrived,
        entered: Entered,
        rows: Float[torch.Tensor, "T D"] | Int[torch.Tensor, "T"],
    ) -> None:
        step, size, times = arrived.step, arrived.payload.nbytes, arrived.times
        table, operations, expires_s = entered.table, entered.operations, arrived.expires_s
        span = session.context.terms.span
        # Of this epoch, whatever the session is in by then: nobody reads an old outbox.
        put, computed = session.outbox.put_nowait, session.held.computed

        def done(outcome: Outcome) -> None:
            times.ready_us, times.compute_us = now_us(), outcome.compute_us
            times.copy_us, times.exposed_us = outcome.copy_us, outcome.exposed_us
            put(Finished(step, computed(entered, outcome), size, times, expires_s))

        kept = self._parts.prefixes.begin_step(session, step, done)
        session.held.began(entered)
        if table.is_decode and step.phase == "decode":
            live = self._parts.live_rows
            live.decoded(session.id, table.tokens, session.stages, session.clock())
        self._parts.executor.submit(
            StepWork(
                session=session.id,
                step=step.step,
                phase=Phase(step.phase),
                span=span,
                table=table,
                touches=touched(step),
                operations=None if operations == NO_OPERATIONS else operations,
                choosers=entered.choosers,
                rows=rows,
                wanted=_wanted(session, step),
                wire_dtype=torch_dtype(session.wire_dtype),
                done=self._parts.admission.begin_step(session.id, span, operations.releases, kept),
                client=session.owner,
                background=session.background,
                arrived_us=times.taken_us,
                wire_us=times.wire_us,
            )
        )
        self._taken.add()
        self._tokens.add(table.tokens)


def _wanted(session: Session, step: Step) -> Literal["all", "last", "none"]:
    if not session.is_last:
        return "all"
    return "none" if step.replay or step.sampling else step.want


def _checked_ids(step: Step, ids: torch.Tensor, vocab_size: int) -> Int[torch.Tensor, "T"]:
    """The ids of a step, `[T, 1]` as they come. Raises RequestError for any that is no token."""
    low, high = map(int, torch.aminmax(ids))
    if low < 0 or (vocab_size and high >= vocab_size):
        raise RequestError(
            f"step {step.step} carries id {low if low < 0 else high}, the model knows "
            f"0 to {vocab_size - 1}"
        )
    return ids[:, 0]


def _expiry(message: Step | Replay, now_s: float) -> float:
    """When nobody waits any more for what comes of `message`."""
    return now_s + message.deadline_ms / 1000 if message.deadline_ms else math.inf


def _deadline(expires_s: float) -> float | None:
    return None if math.isinf(expires_s) else expires_s


def _too_late(step: Step) -> str:
    return f"step {step.step} came to its turn after the {step.deadline_ms} ms it was given"
