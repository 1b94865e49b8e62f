"""The stages of one session as they stand, and what has been heard of them.

A `Seat` is a span of the route with the peer that holds it and the stream to it, if
one stands. The `Circuit` has them in order; it turns what the streams tell into
answers for the ledger and symptoms for the recovery, and wakes whoever waits for a
stage when a symptom comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bloombee.client.ledger import Ledger, PendingStep
from bloombee.client.links import StageLink
from bloombee.client.payloads import RowsTo
from bloombee.client.surroundings import Holder
from bloombee.client.tracing import Tracer
from bloombee.client.traffic import Progress
from bloombee.core import PeerId, Route, Span, Stage
from bloombee.core.identifiers import SESSION_ID_BYTES
from bloombee.errors import BloomBeeError, DeadlineExceeded, TransportError
from bloombee.planner.neighbours import Neighbours
from bloombee.planner.recovery import Trouble, trouble_of
from bloombee.protocol.messages import Failed, Leaving, Opened, Output, Source
from bloombee.telemetry import loop_us
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)


_OF_AN_EPOCH = (Trouble.HOP, Trouble.CONFUSED, Trouble.STALLED)


class Interrupted(Exception):  # noqa: N818 - never leaves the client package
    """Something has happened to a stage: nothing that is waited for may come any more."""


@dataclass(slots=True, eq=False)
class Seat:
    """A span of the route and who holds it.

    `is_known` when the peer may hold the session already, `opened` what it said of it
    in this epoch, `source` where a new peer may fetch what the one before it holds.
    `spares` would take its blocks over, and can be reached in a round trip.
    """

    stage: Stage
    endpoints: tuple[Endpoint, ...]
    link: StageLink | None = None
    is_known: bool = False
    opened: Opened | None = None
    source: Source | None = None
    leaving: Leaving | None = None
    spares: tuple[Holder, ...] = ()

    @property
    def peer(self) -> PeerId:
        """Who holds it."""
        return self.stage.peer

    @property
    def span(self) -> Span:
        """The blocks."""
        return self.stage.span

    @property
    def is_up(self) -> bool:
        """Whether a stream to it stands."""
        return self.link is not None and self.link.is_up

    @property
    def stream(self) -> StageLink:
        """The stream to it. Raises TransportError when there is none."""
        if self.link is None:
            raise TransportError(f"no connection to blocks {self.span} at {self.peer[-8:]} stands")
        return self.link

    @property
    def standing(self) -> Opened:
        """What the stage holds. Raises TransportError when it was not opened."""
        if self.opened is None:
            raise TransportError(f"blocks {self.span} at {self.peer[-8:]} are not open")
        return self.opened


@dataclass(frozen=True, slots=True)
class Report:
    """A symptom of one seat, and the error that tells of it."""

    seat: Seat
    trouble: Trouble
    error: BloomBeeError


class Circuit:
    """The seats of a session, its epoch, and its streams."""

    def __init__(
        self,
        seats: list[Seat],
        ledger: Ledger,
        tasks: asyncio.TaskGroup,
        close_s: float,
        neighbours: Neighbours,
    ) -> None:
        self.session = os.urandom(SESSION_ID_BYTES)
        self.epoch = -1
        self.seats = seats
        self.ledger = ledger
        self.tasks = tasks
        self.neighbours = neighbours
        self.progress = Progress(Route(tuple(seat.stage for seat in seats)))
        self.progress.traffic.sessions.append(self.session.hex())
        self.tracer = Tracer(self.progress.traffic.traces.append)
        _log.debug("session %s on %d stages", self.session.hex(), len(seats))
        self.reports: list[Report] = []
        self.alarm = asyncio.Event()
        """Set when there is something to see to, even if nobody waits for a stage."""
        self.is_closing = False
        self.links: dict[StageLink, None] = {}
        """Every stream that stands or may stand, those of replaced stages too."""
        self._scope: asyncio.Timeout | None = None
        self._retiring: set[StageLink] = set()
        self._close_s = close_s

    async def close(self) -> None:
        """Free the session on every stage that can be reached. Never raises."""
        self.is_closing = True
        self.interrupt()
        async with asyncio.TaskGroup() as tasks:
            for link in tuple(self.links):
                tasks.create_task(self._retire(link))

    @property
    def route(self) -> Route:
        """The stages that hold the session."""
        return self.progress.route

    def seat_of(self, link: StageLink) -> Seat | None:
        """The seat that `link` leads to, None for one that was replaced."""
        return next((seat for seat in self.seats if seat.link is link), None)

    def connect(self, seat: Seat, link: StageLink) -> None:
        """Give a seat its stream, and listen to it.

        An earlier one stays until `retire_strangers`: its end would tell the stage that
        we have gone before the new one says that we are back.
        """
        seat.link = link
        self.links[link] = None
        self.progress.traffic.streams.append(link.connection.counters)
        estimator = self.neighbours.estimator(link.stage.peer)
        link.start(self, self.tasks, self.session, estimator)

    def rows_in(self, phase: str) -> RowsTo:
        """How rows go to the first stage."""
        return RowsTo(self.neighbours, self.seats[0].peer, phase)

    def replace(self, old: list[Seat], new: list[Seat]) -> None:
        """Put `new` where the neighbours `old` were."""
        at = self.seats.index(old[0])
        self.seats[at : at + len(old)] = new
        self.progress.route = Route(tuple(seat.stage for seat in self.seats))

    def retire(self, link: StageLink) -> None:
        """Free the session at the end of a stream that is needed no longer, in the background."""
        if link not in self._retiring:
            self._retiring.add(link)
            self.tasks.create_task(self._retire(link))

    def retire_strangers(self) -> None:
        """Let go of all streams that belong to no seat."""
        held = {seat.link for seat in self.seats}
        for link in [link for link in self.links if link not in held]:
            self.retire(link)

    async def _retire(self, link: StageLink) -> None:
        try:
            await link.close(self.session, self._close_s)
        finally:
            self.links.pop(link, None)
            self._retiring.discard(link)

    # What the streams tell ------------------------------------------------------------

    def hear_output(self, link: StageLink, output: Output, content: memoryview) -> None:
        """An answer: of the last stage to a step, of any to a replay."""
        if link is self.seats[-1].link:
            step = self.ledger.take(output, content)
            if step is not None:
                self._trace(link, step, output)
                return
        if not self.ledger.take_replay(output.step):
            _log.debug("%s answered step %d, which is not waited for", link, output.step)

    def _trace(self, link: StageLink, step: PendingStep, output: Output) -> None:
        if step.trace:
            clock_us = self.neighbours.estimator(link.stage.peer).clock_us
            self.tracer.answered(step, output, loop_us(), clock_us)
            if not self.ledger:
                self.tracer.forget()

    def hear_failed(self, link: StageLink, failed: Failed) -> None:
        """An error of this epoch is a symptom; one of an earlier epoch is old news."""
        if failed.epoch < self.epoch or (failed.step and not self.ledger.expects(failed.step)):
            _log.debug("old news of %s: %s", link, failed.message)
            return
        error = link.told(failed)
        trouble = trouble_of(error, reported=True)
        if trouble is Trouble.REQUEST and not failed.step:
            trouble = Trouble.CONFUSED  # no step is at fault, and no Open was refused
        if trouble is Trouble.CONFUSED and self.ledger.is_replay(failed.step):
            trouble = Trouble.GAP
        self.report(link, trouble, error)

    def hear_leaving(self, link: StageLink, leaving: Leaving) -> None:
        """A stage has to be replaced, but for now it goes on."""
        seat = self.seat_of(link)
        if seat is not None:
            _log.info("%s stops within %.3g s", link, leaving.deadline_s)
            seat.leaving = leaving
            self.alarm.set()

    def hear_end(self, link: StageLink, error: BloomBeeError) -> None:
        """A stream is gone."""
        trouble = Trouble.SILENT if link.silent else trouble_of(error, reported=False)
        self.report(link, trouble, error)

    def report(self, link: StageLink, trouble: Trouble, error: BloomBeeError) -> None:
        """Note a symptom of the stage at `link`, if it is still one of ours."""
        seat = self.seat_of(link)
        if seat is not None:
            self.note(seat, trouble, error)

    def note(self, seat: Seat, trouble: Trouble, error: BloomBeeError) -> None:
        """Note a symptom, and wake whoever waits."""
        if self.is_closing:
            return
        self.reports.append(Report(seat, trouble, error))
        self.alarm.set()
        self.interrupt()

    def begin_epoch(self) -> None:
        """Count the epoch up: what hops and steps of the last one suffered is over."""
        self.epoch += 1
        self.reports = [report for report in self.reports if report.trouble not in _OF_AN_EPOCH]

    def take_reports(self) -> list[Report]:
        """What was noted of seats that are still there, once."""
        reports = [report for report in self.reports if report.seat in self.seats]
        self.reports.clear()
        return reports

    # Waiting for stages ----------------------------------------------------------------

    @asynccontextmanager
    async def waiting(self, until_s: float, what: str) -> AsyncIterator[asyncio.Timeout]:
        """What happens inside waits for stages: it ends when one has a symptom.

        Raises Interrupted then and when the session is closed, DeadlineExceeded at
        `until_s`, a time of the event loop; what of it is late is told as `what`.
        """
        if self.reports or self.is_closing:
            raise Interrupted
        outer, self._scope = self._scope, asyncio.timeout_at(until_s)
        try:
            async with self._scope as scope:
                yield scope
        except TimeoutError:
            if self.reports or self.is_closing:
                raise Interrupted from None
            raise DeadlineExceeded(f"{what} took too long") from None
        finally:
            self._scope = outer

    def interrupt(self) -> None:
        """End what waits for stages now."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())
