"""A session: one client's sequences and their KV on every stage of a route.

The client opens one stream to every stage, in parallel; each stage links to the
next by a secret that only this client's stages know. A step goes to the first
stage, travels from stage to stage, and its output comes from the last. A long
prompt leaves as several steps, a few of them in flight at a time, so that all
stages work.

Whatever happens to a stage is made good (`recovery`) before the step goes on: the
caller gets the rows of an undisturbed run. An error reaches the caller when time is up,
when blocks have no holder, or when the request is at fault; the session can go on
after each of them, and the next step recovers first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float

from bloombee.client.circuit import Circuit, Interrupted, Seat
from bloombee.client.heartbeat import keep_alive
from bloombee.client.history import Entry, History
from bloombee.client.ledger import NO_OPERATIONS, Answer, Ledger, PendingStep, Standing
from bloombee.client.moving import PAUSE_S, Moving
from bloombee.client.opening import Opening, StageFailure, dial, open_seats
from bloombee.client.payloads import decode_rows, encode_rows
from bloombee.client.prefixes import Beginning, chains
from bloombee.client.recovery import Recoverer
from bloombee.client.replay import EmbedEntries, Past, send
from bloombee.client.spares import Spares
from bloombee.client.split import Want, part_tokens, split
from bloombee.client.surroundings import Holder, Surroundings
from bloombee.client.terms import SessionTerms
from bloombee.client.traffic import Progress, StepTrace, Traffic
from bloombee.core import PackedTable, Route
from bloombee.errors import (
    BloomBeeError,
    DeadlineExceeded,
    KVFull,
    RequestError,
    StepFailed,
    TransportError,
)
from bloombee.protocol.messages import Operations
from bloombee.telemetry import now_us

_log = logging.getLogger(__name__)

StepPhase = Literal["prefill", "decode", "verify"]

_MS = 1000


class RemoteSession:
    """An open session. Everything here runs in one event loop; one step at a time."""

    def __init__(
        self,
        holders: Sequence[Holder],
        terms: SessionTerms,
        around: Surroundings,
        tasks: asyncio.TaskGroup,
        embed: EmbedEntries,
    ) -> None:
        self.terms = terms
        self.history = History(terms.sequences, keep_starts=terms.whole_prompts)
        self.max_step_tokens = 0
        self.entered = 0
        """How many steps are in the history, whatever became of them since."""
        self._around = around
        self._settings = around.settings
        self._ledger = Ledger(terms.sequences)
        seats = [Seat(holder.stage, holder.endpoints) for holder in holders]
        self._circuit = Circuit(seats, self._ledger, tasks, self._settings.close_s)
        past = Past(terms, self.history, embed)
        self._recoverer = Recoverer(self._circuit, around, past)
        self._lock = asyncio.Lock()
        self._moving = Moving(self._circuit, around, terms)
        self._background: list[asyncio.Task[None]] = []
        self._closed: asyncio.Event | None = None
        self._prefixes = chains(terms) if self._settings.reuse_prompts else ()
        self._beginning = Beginning(self._circuit, terms) if self._prefixes else None

    async def open(self, wait_s: float = 0.0) -> None:
        """Reach all stages and reserve on each; where KV is short, queue for it up to `wait_s`.

        Raises StageFailure, which carries the peer and its error; nothing is left then.
        """
        circuit, settings = self._circuit, self._settings
        try:
            refusals = await dial(circuit, circuit.seats, self._around, settings.connect_s)
            if not refusals:
                opening = Opening(
                    terms=self.terms,
                    open_s=settings.open_s / 2,  # there is time for another attempt
                    wait_s=wait_s,
                    in_turn=wait_s > 0,
                    prefixes=self._prefixes,
                )
                self._run(keep_alive(circuit, settings))
                refusals = await open_seats(circuit, opening)
            for refusal in sorted(refusals, key=lambda each: isinstance(each.error, KVFull)):
                raise StageFailure(refusal.seat.peer, refusal.error)
        except BaseException:
            await self.close()
            raise
        self._measure()
        self._run(Spares(circuit, self._around, self.terms).run())
        self._run(self._take_care())  # not before: until here it is opening that sees to losses

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(self._circuit.tasks.create_task(work))

    def _measure(self) -> None:
        allowed = min(seat.standing.max_step_tokens for seat in self._circuit.seats)
        self.max_step_tokens = self.terms.step_tokens(allowed, self._settings.payload_bytes)

    @property
    def route(self) -> Route:
        """The stages that hold the session now."""
        return self._circuit.route

    @property
    def progress(self) -> Progress:
        """Route and traffic, for whoever shows them; stays true while the session runs."""
        return self._circuit.progress

    @property
    def traffic(self) -> Traffic:
        """What the session moved."""
        return self._circuit.progress.traffic

    @property
    def is_open(self) -> bool:
        """Whether steps can be taken."""
        return self._closed is None

    # Steps ---------------------------------------------------------------------------

    async def step(  # noqa: PLR0913 - what one step is, by name
        self,
        rows: Float[torch.Tensor, "T D"],
        table: PackedTable,
        *,
        entries: Sequence[Entry],
        operations: Operations = NO_OPERATIONS,
        want: Want = "last",
        phase: StepPhase = "decode",
        within_s: float | None = None,
    ) -> Float[torch.Tensor, "R D"]:
        """Send T packed rows through all stages; returns the rows that `want` asks for.

        `all` gives T rows, `last` one for each sequence of the table, `none` none.
        `operations` are applied before. `entries` (the T ids) are kept in `history`;
        `rows` are kept until they are answered and must not change. It takes at most
        `within_s` and the settings' `step_s`, recoveries included.

        Raises RequestError when a sequence would outgrow the session (nothing is sent
        then), DeadlineExceeded, SwarmError when blocks have no holder, or what a stage
        reports of the request. The session goes on after each of them.
        """
        self._check(table)
        limit_s = self._limit_s(within_s)
        until_s = asyncio.get_running_loop().time() + limit_s
        since_s = await self._take_turn(until_s, limit_s)
        try:
            if self._ledger or self._circuit.alarm.is_set() or self._recoverer.is_due:
                await self._settle(until_s, since_s=since_s)
            sent = self._enter(rows, table, entries, operations, want, phase)
            await self._settle(until_s)
        except DeadlineExceeded as error:
            raise self._late(limit_s, error) from None
        finally:
            self._lock.release()
        outputs = [self._rows_of(step) for step in sent]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _limit_s(self, within_s: float | None) -> float:
        return self._settings.step_s if within_s is None else min(within_s, self._settings.step_s)

    async def _take_turn(self, until_s: float, limit_s: float) -> float | None:
        """Wait for the lock; since when, where it was a recovery that was waited for."""
        if not self._lock.locked() and limit_s > 0:
            await self._lock.acquire()
            return None
        since_s = asyncio.get_running_loop().time() if self._recoverer.is_caring else None
        try:
            async with asyncio.timeout_at(until_s):
                await self._lock.acquire()
        except TimeoutError:
            raise self._late(limit_s) from None
        return since_s

    def _check(self, table: PackedTable) -> None:
        if self._closed is not None:
            raise RequestError("the session is closed; open another")
        limit = self.terms.max_length
        if any(f + c > limit for f, c in zip(table.first_positions, table.counts, strict=True)):
            longest = max(f + c for f, c in zip(table.first_positions, table.counts, strict=True))
            raise RequestError(
                f"a sequence would hold {longest} tokens, the session was opened for {limit}"
            )
        if self.terms.whole_prompts and table.tokens > self.max_step_tokens:
            raise RequestError(
                f"this model computes a prompt in one step, of at most {self.max_step_tokens} "
                f"tokens here, and this one has {table.tokens}: send fewer or shorter prompts"
            )

    def _late(self, limit_s: float, error: BloomBeeError | None = None) -> DeadlineExceeded:
        message = f"a step through {self.route} took longer than {limit_s:.3g} s"
        return DeadlineExceeded(f"{message}: {error}" if error is not None else message)

    def _enter(
        self,
        rows: torch.Tensor,
        table: PackedTable,
        entries: Sequence[Entry],
        operations: Operations,
        want: Want,
        phase: StepPhase,
    ) -> list[PendingStep]:
        """Write a step into the books, cut to parts; nothing is sent yet."""
        if (beginning := self._beginning) is not None:
            beginning.check(table, entries)
        self.history.apply(operations)
        self.history.append(table, entries)
        self.entered += 1
        if beginning is not None:
            rows, table, operations = beginning.first(rows, table, operations)
            self._beginning = None
        steps: list[PendingStep] = []
        for part in split(table, want, self._part_tokens(table.tokens, phase)):
            payload, content = encode_rows(
                rows[part.start : part.stop], self.terms.dtype, self._settings.codec
            )
            step = PendingStep(
                self._ledger.number(),
                part,
                operations,
                phase,
                payload,
                content,
                self._settings.trace,
            )
            operations = NO_OPERATIONS
            self._ledger.enter(step)
            steps.append(step)
        return steps

    def _part_tokens(self, tokens: int, phase: StepPhase) -> int:
        stages = len(self._circuit.seats)
        one_stage = phase != "prefill" or stages == 1
        if self.terms.whole_prompts or (one_stage and tokens <= self.max_step_tokens):
            return tokens
        return part_tokens(tokens, stages, self._settings.prefill_tokens, self.max_step_tokens)

    def _rows_of(self, step: PendingStep) -> torch.Tensor:
        output, content = step.answer.result()
        part = step.part
        rows = {"all": part.table.tokens, "last": len(part.table.counts), "none": 0}[part.wants]
        shape = (rows, self.terms.hidden_size)
        return decode_rows(output.payload, content, shape, self.terms.dtype)[: part.kept]

    async def _settle(
        self, until_s: float, *, is_patient: bool = True, since_s: float | None = None
    ) -> None:
        """Send and wait until nothing is pending; `since_s` is for the first recovery it takes."""
        circuit = self._circuit
        while True:
            if self._moving.is_due:
                await self._moving.request()
            if circuit.reports or self._recoverer.is_due:
                await self._recover(until_s, is_patient=is_patient, since_s=since_s)
                since_s = None
            circuit.alarm.clear()
            try:
                async with circuit.waiting(until_s, "an answer"):
                    await self._pump(until_s)
                return
            except Interrupted:
                self._check_open()

    async def _pump(self, until_s: float) -> None:
        """Send what is pending, a few steps ahead, and wait for the answers."""
        ledger, window = self._ledger, self._settings.steps_in_flight
        while ledger:
            for step in ledger.first(window):
                if not step.sent:
                    await self._send(step, until_s)
            oldest = ledger.oldest
            if oldest is not None:
                await asyncio.shield(oldest.answer)
                self._recoverer.progress()

    async def _send(self, step: PendingStep, until_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        left_ms = max(1, min(int((until_s - now_s) * _MS), (1 << 32) - 1))
        standing = Standing(self._circuit.session, self._circuit.epoch, left_ms)
        message = step.message(standing, self._ledger.answered)
        if step.trace and not step.is_traced:
            step.is_traced = True
            step.answer.add_done_callback(partial(self._trace, now_us()))
        await send(self._circuit.seats[0].stream, message, step.content)
        step.sent = True  # not before: cut short, it may or may not be on its way

    def _trace(self, sent_us: int, answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled():
            taken = StepTrace(now_us() - sent_us, answer.result()[0].timings)
            self.traffic.traces.append(taken)

    # Losses ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._circuit.is_closing:
            raise TransportError("the session was closed")

    async def _recover(self, until_s: float, *, is_patient: bool, since_s: float | None) -> None:
        try:
            await self._recoverer.run(until_s, is_patient=is_patient, since_s=since_s)
        except Interrupted:
            self._check_open()
        except (RequestError, StepFailed):
            self._withdraw()
            raise
        self._measure()

    def _withdraw(self) -> None:
        """Give up what is pending, which can't be computed; the rest is rebuilt later.

        The operations of these steps stay done, their tokens are forgotten.
        """
        for step in reversed(self._ledger.withdraw()):
            table = step.part.table
            for sequence, first in zip(table.sequences, table.first_positions, strict=True):
                self.history.cut(sequence, first)
        self._forget_stages()

    def _forget_stages(self) -> None:
        """What stages hold counts no longer: all of it is computed again."""
        self._ledger.rebase(range(self.terms.sequences))
        self._recoverer.start_over()

    async def restore(self, past: Sequence[Sequence[Entry]], within_s: float | None = None) -> None:
        """Hold these entries in sequences 0, 1, ...: all stages compute them.

        For a new session. Takes as long and raises as `step` does; the entries are in the
        history from the start, and if this fails the next step computes them first.
        """
        for sequence, entries in enumerate(past):
            self.history.restore(sequence, entries)
        self._forget_stages()
        limit_s = self._limit_s(within_s)
        until_s = asyncio.get_running_loop().time() + limit_s
        await self._take_turn(until_s, limit_s)
        try:
            await self._settle(until_s)
        finally:
            self._lock.release()

    async def _take_care(self) -> None:
        """See to what happens while no step runs, so that stages need not be rebuilt later.

        It tries for a while, but never keeps a step waiting for servers to join.
        """
        circuit, now = self._circuit, asyncio.get_running_loop().time
        since_s = now()
        while True:
            tries = self._recoverer.is_due and now() < since_s + self._settings.recovery_s
            try:
                async with asyncio.timeout(PAUSE_S if tries or self._moving.is_due else None):
                    await circuit.alarm.wait()
            except TimeoutError:
                _log.debug("trying again while no step runs")
            if not self._recoverer.is_due:
                since_s = now()
            try:
                async with self._lock:
                    await self._settle(now() + self._settings.step_s, is_patient=False)
            except BloomBeeError as error:
                circuit.alarm.clear()
                _log.info("the session is not whole: %s", error)

    async def close(self) -> None:
        """Free the session on every stage. Never raises; may be called again."""
        if self._closed is not None:
            await self._closed.wait()
            return
        self._closed = asyncio.Event()
        try:
            for task in self._background:
                task.cancel()
            await self._circuit.close()
        finally:
            self._closed.set()
