"""Who holds each span of a session: those who stay, those dialed again, those who take over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from bloombee.client.circuit import Circuit, Report, Seat
from bloombee.client.opening import Refusal, dial
from bloombee.client.surroundings import Holder, Surroundings
from bloombee.client.terms import SessionTerms
from bloombee.core import PeerId, Span
from bloombee.errors import BloomBeeError, SwarmError
from bloombee.planner.recovery import Care, Cares, Treatment, Trouble
from bloombee.protocol.messages import Source

_log = logging.getLogger(__name__)

REDIAL_S = 1.0
"""For a peer whose stream broke to take another: it may hold the session still."""
TAKE_OVER_S = 5.0
"""For a peer that could take lost blocks to be reached."""
PATIENT_LOOKS = 4
"""Looks for which holders of lost blocks that failed of late are waited for; where there are
none at all, stages that live are given up at once for a wider span that others hold."""


class _Case(Protocol):
    last: BloomBeeError | None
    blamed: set[PeerId]


class Staffing:
    """Fills the seats of one circuit."""

    def __init__(self, circuit: Circuit, around: Surroundings, terms: SessionTerms) -> None:
        self._circuit = circuit
        self._around = around
        self._terms = terms
        self._vain_looks = 0

    def judge(self, reports: Sequence[Report], treatment: Treatment) -> None:
        """Leave out for a while those who are to be replaced, for they failed."""
        now_s = asyncio.get_running_loop().time()
        for seat, cares in zip(self._circuit.seats, treatment.cares, strict=True):
            troubles = {report.trouble for report in reports if report.seat is seat}
            if Trouble.STOPPING in troubles:
                self._around.health.leaves(seat.peer, now_s)
            elif cares[0] is Care.REPLACE:  # also the far end of a hop, which reported nothing
                self._around.health.failed(seat.peer, now_s)

    async def staff(self, cares: Mapping[Seat, Cares], case: _Case) -> dict[Seat, Care]:
        """Give every seat a peer with a stream; says which are to keep what they hold.

        Raises SwarmError when blocks have no holder.
        """
        chosen = {seat: each[0] for seat, each in cares.items()}
        seats = list(self._circuit.seats)
        down = [s for s in seats if chosen[s] is not Care.REPLACE and not s.is_up]
        gone = {seat for seat in down if not self._serves(seat)}
        unreached = await self._redial([seat for seat in down if seat not in gone], case)
        unreached |= gone
        vacant = [seat for seat in seats if chosen[seat] is Care.REPLACE or seat in unreached]
        for run in _neighbours(vacant, seats):
            await self._fill(run, cares, chosen, case)
        self._vain_looks = 0
        return chosen

    async def _redial(self, seats: Iterable[Seat], case: _Case) -> set[Seat]:
        """Dial known peers again; returns the seats that can't be reached."""
        limit_s = min(REDIAL_S, self._around.settings.connect_s)
        refusals = await dial(self._circuit, seats, self._around, limit_s)
        for refusal in refusals:
            self._blame(refusal, case)
        return {refusal.seat for refusal in refusals}

    def _blame(self, refusal: Refusal, case: _Case) -> None:
        """Leave out who can't be reached: once in a case, however often it is tried."""
        case.last = refusal.error
        peer = refusal.seat.peer
        if peer not in case.blamed:
            case.blamed.add(peer)
            self._around.health.failed(peer, asyncio.get_running_loop().time())

    async def _fill(
        self, run: list[Seat], cares: Mapping[Seat, Cares], chosen: dict[Seat, Care], case: _Case
    ) -> None:
        try:
            await self._take_over(run, case, frozenset())
            return
        except BloomBeeError as error:
            missing = error if isinstance(error, SwarmError) else SwarmError(str(error))
        stuck = await self._stay(run, cares, chosen, case)
        if len(stuck) == len(run):
            self._vain_looks += 1
            waits = self._vain_looks < PATIENT_LOOKS and self._has_holders(run, frozenset())
            if waits or not await self._widen(run, case):
                raise missing
            return
        for part in _neighbours(stuck, run):
            await self._fill(part, cares, chosen, case)

    async def _stay(
        self, run: list[Seat], cares: Mapping[Seat, Cares], chosen: dict[Seat, Care], case: _Case
    ) -> list[Seat]:
        """Let seats go on with their peers where nobody else can; returns those that can't."""
        wished = [s for s in run if cares[s][0] is Care.REPLACE or self._has_moved(s)]
        wished = [seat for seat in wished if seat.is_up or self._serves(seat)]
        unreached = await self._redial([seat for seat in wished if not seat.is_up], case)
        stays = [seat for seat in wished if seat not in unreached]
        for seat in stays:
            chosen[seat] = next(care for care in cares[seat] if care is not Care.REPLACE)
        return [seat for seat in run if seat not in stays]

    def _has_moved(self, seat: Seat) -> bool:
        """Whether its peer is said to listen where we have not tried yet: it may be back."""
        return not set(self._around.endpoints(seat.peer)) <= set(seat.endpoints)

    def _serves(self, seat: Seat) -> bool:
        """Whether its peer may still hold its blocks: it may have started again with others."""
        return self._around.serves(seat.peer, seat.span)

    async def _widen(self, run: list[Seat], case: _Case) -> bool:
        """Give up living neighbours too, where a wider span has other holders."""
        seats = self._circuit.seats
        first, last = seats.index(run[0]), seats.index(run[-1])
        for low, high in ((first - 1, last), (first, last + 1), (0, len(seats) - 1)):
            if low < 0 or high >= len(seats):
                continue
            wider = seats[low : high + 1]
            living = frozenset(seat.peer for seat in wider if seat not in run)
            if not self._has_holders(wider, living):
                continue
            try:
                await self._take_over(wider, case, living)
            except BloomBeeError as error:
                _log.debug("no other servers for a wider span either: %s", error)
            else:
                return True
        return False

    async def _take_over(self, run: list[Seat], case: _Case, living: frozenset[PeerId]) -> None:
        """Other peers for the blocks of `run`, those in `living` among them.

        Who holds a lost seat is not one: where nobody else can be had, it stays (`_stay`),
        with what it has; unless it has other blocks now. Raises SwarmError or RequestError.
        """
        span = Span(run[0].span.start, run[-1].span.end)
        fresh = False
        while True:
            busy = self._busy(run, living)
            found = self._spares(run, busy) if not fresh else ()
            if not found:
                found = await self._around.holders(span, self._terms, busy=busy, fresh=fresh)
            new = [Seat(holder.stage, holder.endpoints) for holder in found]
            limit_s = min(TAKE_OVER_S, self._around.settings.connect_s)
            failed = await dial(self._circuit, new, self._around, limit_s)
            if not failed:
                break
            fresh = True
            for refusal in failed:
                case.last = refusal.error
                self._around.health.failed(refusal.seat.peer, asyncio.get_running_loop().time())
        await self._free(run, {seat.peer for seat in new})
        if len(run) == len(new) == 1:
            new[0].source = _source(run[0])
        self._circuit.replace(run, new)

    def _spares(self, run: Sequence[Seat], busy: Mapping[PeerId, str]) -> Sequence[Holder]:
        """Who stands ready for a seat that is lost alone."""
        spares = run[0].spares if len(run) == 1 else ()
        return spares if self._around.fit(spares, busy) else ()

    def _busy(self, run: Sequence[Seat], living: frozenset[PeerId]) -> dict[PeerId, str]:
        """Who can't take the blocks of `run`, and why."""
        return {
            seat.peer: "was lost by the session" if seat in run else "is in the session"
            for seat in self._circuit.seats
            if seat.peer not in living and (seat.is_up or seat not in run or self._serves(seat))
        }

    def _has_holders(self, run: Sequence[Seat], living: frozenset[PeerId]) -> bool:
        """Whether others hold the blocks of `run`, and be it that they failed of late."""
        span = Span(run[0].span.start, run[-1].span.end)
        return self._around.has_holders(span, self._terms, self._busy(run, living))

    async def _free(self, run: list[Seat], peers: set[PeerId]) -> None:
        """Close the session where a peer is to hold another span of it."""
        for seat in run:
            if seat.peer in peers and seat.link is not None:
                await seat.link.close(self._circuit.session, self._around.settings.close_s)


def _source(seat: Seat) -> Source | None:
    if seat.leaving is None or seat.link is None or not seat.link.is_up:
        return None
    link = seat.link
    return Source(link.hop, link.secret, link.epoch, seat.leaving.replay_s)


def _neighbours(chosen: Sequence[Seat], seats: Sequence[Seat]) -> list[list[Seat]]:
    """The chosen seats, in runs without a gap."""
    runs: list[list[Seat]] = []
    for index, seat in enumerate(seats):
        if seat not in chosen:
            continue
        if runs and index and runs[-1][-1] is seats[index - 1]:
            runs[-1].append(seat)
        else:
            runs.append([seat])
    return runs
