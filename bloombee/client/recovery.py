"""Making good a loss: new servers for lost blocks, a new epoch for all, and rows replayed.

One round: every seat gets a peer and a stream (`Staffing`), all seats are opened at the
next epoch and say what they hold, gaps are filled by replay. Whatever happens to a
stage meanwhile ends the round, and the next one starts from how things stand then.
Rounds are bounded by time alone, with growing pauses between them. The session
stays as it is when time is up: the next step tries again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from bloombee.client.circuit import Circuit, Interrupted, Report
from bloombee.client.ledger import NO_OPERATIONS
from bloombee.client.opening import Opening, Refusal, open_seats
from bloombee.client.rebuild import Gap, gaps
from bloombee.client.replay import Effort, Past, Rebuilder
from bloombee.client.staffing import Staffing
from bloombee.client.surroundings import Surroundings
from bloombee.client.traffic import Recovery
from bloombee.core import PeerId, Stage
from bloombee.errors import BloomBeeError, DeadlineExceeded, HopLost, KVFull, SwarmError
from bloombee.planner.recovery import (
    Care,
    Cares,
    Casebook,
    Symptom,
    Treatment,
    Trouble,
    trouble_of,
)

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
"""Between two rounds, and between two looks for servers of missing blocks."""


@dataclass(slots=True)
class _Case:
    """One run: what it started from, how long it may take, and what it took."""

    begun_s: float
    until_s: float
    before: tuple[Stage, ...]
    effort: Effort = field(default_factory=Effort)
    full: set[PeerId] = field(default_factory=set[PeerId])
    blamed: set[PeerId] = field(default_factory=set[PeerId])
    last: BloomBeeError | None = None
    is_waiting: bool = False
    bound: asyncio.Timeout | None = None
    staffing_s: float = 0.0
    opening_s: float = 0.0
    replaying_s: float = 0.0


class Recoverer:
    """Recovers one session. `is_due` while its stages don't hold it.

    `is_caring` while a run is under way that no call waits for.
    """

    def __init__(self, circuit: Circuit, around: Surroundings, past: Past) -> None:
        self.is_due = False
        self.is_caring = False
        self._circuit = circuit
        self._around = around
        self._past = past
        self._settings = around.settings
        self._staffing = Staffing(circuit, around, past.terms)
        self._rebuilder = Rebuilder(circuit, past, around.settings)
        self._casebook = Casebook(first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S)
        self._is_unproven = True
        self._vain: BloomBeeError | None = None
        """Why the last run has failed, if it has."""
        self._unlinked_since_s: float | None = None
        """Since when links between stages fail one after another, with no answer in between."""
        self._ended_s = 0.0

    def progress(self) -> None:
        """A step was answered."""
        self._casebook.progress()
        self._unlinked_since_s = None
        if self._is_unproven:
            self._is_unproven = False
            for seat in self._circuit.seats:
                self._around.health.worked(seat.peer)

    def called(self) -> None:
        """A call begins to wait: links may fail for as long again as `recovery_s` says."""
        self._unlinked_since_s = None

    def start_over(self) -> None:
        """What stages hold counts no longer: all of it is to be computed again."""
        self._casebook.progress()
        self.is_due = True

    async def run(self, until_s: float, *, is_patient: bool, since_s: float | None = None) -> None:
        """Work until all stages hold what was answered; pending steps are then to be sent.

        What it may take counts from `since_s`, when whoever waits for it has waited for an
        earlier run already; and when links between stages fail again and again, from the first.
        Raises SwarmError when blocks have no holder (for too long, if it `is_patient`), the
        error of a stage that no other could mend, or DeadlineExceeded at `until_s` of the
        event loop's time.
        """
        now = asyncio.get_running_loop().time
        begun_s = self._begun_s(now(), since_s)
        limit_s = min(until_s, begun_s + self._settings.recovery_s)
        case = _Case(begun_s, limit_s, self._circuit.route.stages)
        case.last = None if since_s is None else self._vain
        self.is_due, self.is_caring = True, not is_patient
        try:
            await self._recover(case, until_s, is_patient=is_patient)
        finally:
            self.is_caring = False
            self._ended_s = now()
        self._is_unproven = True
        self._vain = None
        self._note_success(case)

    def _begun_s(self, now_s: float, since_s: float | None) -> float:
        """When it began; where only links have failed, with the first run that did not mend them.

        Every stage answers then, and opening succeeds each time.
        """
        begun_s = now_s if since_s is None else since_s
        reports = self._circuit.reports
        if not reports or any(report.trouble is not Trouble.HOP for report in reports):
            return begun_s
        first_s = self._unlinked_since_s
        if first_s is None or now_s - self._ended_s > self._settings.recovery_s:
            first_s = self._unlinked_since_s = begun_s
        return min(begun_s, first_s)

    async def _recover(self, case: _Case, until_s: float, *, is_patient: bool) -> None:
        while self.is_due:
            treatment = self._treat(case)
            if case.until_s <= asyncio.get_running_loop().time():
                raise self._late(case, until_s)
            try:
                async with asyncio.timeout_at(case.until_s) as case.bound:
                    await asyncio.sleep(treatment.pause_s)
                    await self._round(treatment.cares, case, until_s)
            except TimeoutError:
                raise self._late(case, until_s) from None
            except Interrupted:
                if self._circuit.is_closing:
                    raise
            except SwarmError as missing:
                if not is_patient:
                    raise
                self._wait_for_holders(case, missing)

    def _treat(self, case: _Case) -> Treatment:
        reports = self._circuit.take_reports()
        seats = self._circuit.seats
        symptoms = [Symptom(seats.index(report.seat), report.trouble) for report in reports]
        treatment = self._casebook.treat(symptoms, [seat.peer for seat in seats])
        for report in reports:
            case.last = report.error
            _log.info("%s: %s", report.trouble, report.error)
        self._staffing.judge(reports, treatment)
        if (hopeless := treatment.hopeless) is not None:
            raise _error_of(reports, hopeless)
        return treatment

    async def _round(self, cares: tuple[Cares, ...], case: _Case, until_s: float) -> None:
        circuit, now = self._circuit, asyncio.get_running_loop().time
        begun_s = now()
        chosen = await self._staffing.staff(dict(zip(circuit.seats, cares, strict=True)), case)
        opening = Opening(
            terms=self._past.terms,
            open_s=self._settings.open_s,
            resumed=frozenset(
                seat for seat in circuit.seats if seat.is_known and chosen.get(seat) is Care.KEEP
            ),
            wait_s=min(self._settings.queue_s, self._settings.recovery_s) if case.full else 0.0,
            full=frozenset(case.full),
        )
        staffed_s = now()
        refusals = await open_seats(circuit, opening)
        case.staffing_s, case.opening_s = staffed_s - begun_s, now() - staffed_s
        circuit.retire_strangers()
        refusals = refusals or self._too_narrow()
        for refusal in refusals:
            self._refused(refusal, case)
        if refusals or circuit.reports:
            raise Interrupted
        empty = self._empty()
        async with circuit.waiting(until_s, "rebuilding lost stages"):
            await self._fill(gaps(empty), case, until_s)
        circuit.ledger.unsent()
        self.is_due = False
        if empty[-1]:
            self._part_from_overtaken()

    async def _fill(self, holes: list[Gap], case: _Case, until_s: float) -> None:
        """Replay into `holes`; the time that it takes is not spent on links that fail."""
        now = asyncio.get_running_loop().time
        begun_s = now()
        await self._rebuilder.fill(holes, case.effort, lambda: self._went_on(case, until_s))
        case.replaying_s = now() - begun_s
        if self._unlinked_since_s is not None:
            self._unlinked_since_s += case.replaying_s

    def _part_from_overtaken(self) -> None:
        """The last stage chooses anew: no stage may go on with what the lost one chose.

        Rounding may differ where rows are computed in other pieces, and a near tie be
        decided otherwise; the caller has not seen what stages have computed since.
        """
        ledger = self._circuit.ledger
        for step in ledger.overtaken(s.standing.newest_steps for s in self._circuit.seats):
            if step.operations == NO_OPERATIONS:
                ledger.renumber(step)
            else:  # done by some stages, and not by others
                ledger.rebase(range(self._past.terms.sequences))
                self.start_over()
                return

    def _too_narrow(self) -> list[Refusal]:
        """Stages that don't take as many tokens a step as are under way already."""
        tokens = max((step.part.table.tokens for step in self._circuit.ledger), default=0)
        return [
            Refusal(seat, KVFull(f"{seat.stream} takes fewer than {tokens} tokens a step"))
            for seat in self._circuit.seats
            if seat.standing.max_step_tokens < tokens
        ]

    def _refused(self, refusal: Refusal, case: _Case) -> None:
        """A stage that does not open is in trouble, unless its link has told so already."""
        seat, error = refusal.seat, refusal.error
        if isinstance(error, KVFull) and seat.opened is None:
            case.full.add(seat.peer)
        if seat.is_up:
            trouble = trouble_of(error, reported=False)
            if isinstance(error, DeadlineExceeded):
                trouble = Trouble.SILENT
            self._circuit.note(seat, trouble, error)

    def _empty(self) -> list[bool]:
        """Which stages are to be rebuilt; raises Interrupted when some first have to forget."""
        circuit, lengths = self._circuit, self._past.history.lengths
        empty = [
            not circuit.ledger.is_current(seat.standing.newest_steps, lengths)
            for seat in circuit.seats
        ]
        for seat, is_empty in zip(circuit.seats, empty, strict=True):
            if is_empty and any(seat.standing.held_tokens):
                error = SwarmError(f"{seat.stream} lacks steps that were answered")
                circuit.note(seat, Trouble.GAP, error)
        if circuit.reports:
            raise Interrupted
        return empty

    def _went_on(self, case: _Case, until_s: float) -> None:
        """Replaying goes on: as long as it does, only the caller's own time bounds it."""
        bound = asyncio.get_running_loop().time() + self._settings.recovery_s
        case.until_s = max(case.until_s, min(until_s, bound))
        if case.bound is not None and not case.bound.expired():
            case.bound.reschedule(case.until_s)

    def _wait_for_holders(self, case: _Case, missing: SwarmError) -> None:
        case.last = missing
        if not case.is_waiting:
            case.is_waiting = True
            left_s = case.until_s - asyncio.get_running_loop().time()
            _log.warning("waiting up to %.0f s for other servers: %s", left_s, missing)

    def _late(self, case: _Case, until_s: float) -> BloomBeeError:
        self._vain = case.last
        waited_s = asyncio.get_running_loop().time() - case.begun_s
        why = f": {case.last}" if case.last is not None else ""
        if isinstance(case.last, HopLost):
            return SwarmError(f"stages could not be linked in {waited_s:.1f} s{why}")
        if case.is_waiting or case.until_s < until_s:
            return SwarmError(f"lost stages could not be replaced in {waited_s:.1f} s{why}")
        return DeadlineExceeded(f"the time for the step is up while it recovers{why}")

    def _note_success(self, case: _Case) -> None:
        after = self._circuit.route.stages
        done = Recovery(
            tuple(stage for stage in case.before if stage not in after),
            tuple(stage for stage in after if stage not in case.before),
            case.effort.tokens,
            case.effort.row_bytes,
            asyncio.get_running_loop().time() - case.begun_s,
            case.staffing_s,
            case.opening_s,
            case.replaying_s,
        )
        self._circuit.progress.traffic.recoveries.append(done)
        _log.info("recovered: %s", done)


def _error_of(reports: list[Report], symptom: Symptom) -> BloomBeeError:
    for report in reports:
        if report.trouble is symptom.trouble:
            return report.error
    return SwarmError("a stage failed")
