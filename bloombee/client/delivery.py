"""Bringing pending steps to their answers, whatever happens to stages meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from bloombee.client.circuit import Circuit, Interrupted
from bloombee.client.entering import Entering
from bloombee.client.ledger import NO_OPERATIONS, PendingStep, Standing
from bloombee.client.moving import PAUSE_S, Moving
from bloombee.client.recovery import Recoverer
from bloombee.client.replay import Past, send
from bloombee.client.surroundings import Surroundings
from bloombee.errors import BloomBeeError, RequestError, StepFailed, TransportError
from bloombee.telemetry import loop_us

_log = logging.getLogger(__name__)

_MS = 1000


class Delivery:
    """Sends the pending steps of one session, and recovers it. One at a time: see `turn`."""

    def __init__(
        self, circuit: Circuit, around: Surroundings, past: Past, entering: Entering
    ) -> None:
        self._lock = asyncio.Lock()
        self._circuit = circuit
        self._ledger = circuit.ledger
        self._settings = around.settings
        self._past = past
        self._entering = entering
        self._recoverer = Recoverer(circuit, around, past)
        self._moving = Moving(circuit, around, past.terms)

    @asynccontextmanager
    async def turn(self, until_s: float) -> AsyncIterator[None]:
        """What happens inside has the session for itself, which is whole to begin with.

        Raises TimeoutError when others have it until `until_s`, and as `settle`.
        """
        since_s = await self._take_turn(until_s)
        try:
            if self._ledger or self._circuit.alarm.is_set() or self._recoverer.is_due:
                await self.settle(until_s, since_s=since_s)
            yield
        finally:
            self._lock.release()

    async def _take_turn(self, until_s: float) -> float | None:
        """Wait for the lock; since when, where it was a recovery that was waited for."""
        now_s = asyncio.get_running_loop().time()
        if not self._lock.locked() and now_s < until_s:
            await self._lock.acquire()
            return None
        since_s = now_s if self._recoverer.is_caring else None
        async with asyncio.timeout_at(until_s):
            await self._lock.acquire()
        return since_s

    async def settle(
        self, until_s: float, *, is_patient: bool = True, since_s: float | None = None
    ) -> None:
        """Send and wait until nothing is pending; `since_s` is for the first recovery it takes.

        Raises DeadlineExceeded at `until_s` of the event loop's time, SwarmError when blocks
        have no holder (for too long, if it `is_patient`), or what a stage says of a step.
        """
        circuit = self._circuit
        if is_patient:
            self._recoverer.called()
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
        ledger = self._ledger
        window = max(self._settings.steps_in_flight, self._settings.micro_batches or 0)
        while ledger:
            for step in ledger.first(window):
                if not step.sent:
                    await self._send(step, until_s)
            oldest = ledger.oldest
            if oldest is not None:
                await asyncio.shield(oldest.answer)
                # That a loop runs shows in what the servers sent round, not in our own step.
                if not (oldest.is_ours and oldest.until and ledger):
                    self._recoverer.progress()
            if self._moving.is_due:  # a loop may run for long: it is not to end first
                await self._moving.request()

    async def _send(self, step: PendingStep, until_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        left_ms = max(1, min(int((until_s - now_s) * _MS), (1 << 32) - 1))
        standing = Standing(self._circuit.session, self._circuit.epoch, left_ms)
        message = step.message(standing, self._ledger.answered)
        step.is_ours = True
        first = self._circuit.seats[0].stream
        now_us, clock_us = loop_us(), self._circuit.neighbours.estimator(first.stage.peer).clock_us
        if clock_us is not None:
            message = msgspec.structs.replace(message, sent_us=max(0, now_us + clock_us))
        self._circuit.tracer.began(step, now_us)
        await send(first, message, step.content)
        step.sent = True  # not before: cut short, it may or may not be on its way

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
            self.forget_stages()
            raise
        self._entering.measure()

    def _withdraw(self) -> list[PendingStep]:
        """Give up what is pending: its operations stay done, its tokens are forgotten."""
        withdrawn = self._ledger.withdraw()
        for step in reversed(withdrawn):
            table = step.part.table
            for sequence, first in zip(table.sequences, table.first_positions, strict=True):
                self._past.history.cut(sequence, first)
        return withdrawn

    def forget_stages(self) -> None:
        """What stages hold counts no longer: all of it is computed again."""
        self._ledger.rebase(range(self._past.terms.sequences))
        self._recoverer.start_over()

    def abandon(self, sequences: frozenset[int]) -> None:
        """Give up what is pending, which stages may compute further in `sequences`.

        A new epoch, at once, tells them that it ends; the next step cuts what they hold too much.
        """
        withdrawn = self._withdraw()
        operations = [s.operations for s in withdrawn if s.operations is not NO_OPERATIONS]
        if any(each.forks or each.releases for each in operations):
            self.forget_stages()  # some did it, and some did not
        history = self._past.history
        history.ahead |= sequences
        history.ahead |= {sequence for each in operations for sequence, _ in each.truncates}
        self._recoverer.is_due = True
        self._circuit.alarm.set()

    async def take_care(self) -> None:
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
                    await self.settle(now() + self._settings.step_s, is_patient=False)
            except BloomBeeError as error:
                circuit.alarm.clear()
                _log.info("the session is not whole: %s", error)
