"""Opening stages: dial those without a stream, then move all of them to a new epoch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from bloombee.client.circuit import Circuit, Seat
from bloombee.client.links import deadline, reach
from bloombee.client.surroundings import Surroundings
from bloombee.client.terms import SessionTerms
from bloombee.core import PeerId
from bloombee.core.identifiers import SESSION_ID_BYTES
from bloombee.errors import BloomBeeError
from bloombee.protocol.messages import Chain, Open


class StageFailure(Exception):  # noqa: N818 - never leaves the client package
    """`error` happened at `peer` while a session was being opened."""

    def __init__(self, peer: PeerId, error: BloomBeeError) -> None:
        super().__init__(str(error))
        self.peer = peer
        self.error = error


@dataclass(frozen=True, slots=True)
class Refusal:
    """A seat that was not opened, and why."""

    seat: Seat
    error: BloomBeeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How seats are opened.

    Seats in `resumed` keep what they hold, all others start empty. A seat may queue
    for KV up to `wait_s`, those of peers in `full` only if there are any; with `in_turn` one
    after the other, in order of their peers: so that no two clients hold what the
    other waits for. `prefixes` announce the prompts of a new session.
    """

    terms: SessionTerms
    open_s: float
    resumed: frozenset[Seat] = frozenset()
    wait_s: float = 0.0
    full: frozenset[PeerId] = field(default_factory=frozenset[PeerId])
    in_turn: bool = False
    prefixes: tuple[Chain, ...] = ()


async def dial(
    circuit: Circuit, seats: Iterable[Seat], around: Surroundings, deadline_s: float
) -> list[Refusal]:
    """Give every seat a new stream, all at once; returns those that can't be reached."""
    refusals: list[Refusal] = []

    async def reach_one(seat: Seat) -> None:
        seat.endpoints = tuple(dict.fromkeys((*around.endpoints(seat.peer), *seat.endpoints)))
        try:
            async with deadline(deadline_s, f"reaching blocks {seat.span} at {seat.peer[-8:]}"):
                link = await reach(seat.stage, seat.endpoints, around.connect)
        except BloomBeeError as error:
            refusals.append(Refusal(seat, error))
        else:
            circuit.connect(seat, link)

    async with asyncio.TaskGroup() as tasks:
        for seat in seats:
            tasks.create_task(reach_one(seat))
    return refusals


async def open_seats(circuit: Circuit, opening: Opening) -> list[Refusal]:
    """Open all seats at the next epoch; returns those that refused or broke.

    Every seat has a stream. Sets their `opened`, and the epoch of the circuit.
    """
    circuit.begin_epoch()
    secret = os.urandom(SESSION_ID_BYTES)
    refusals: list[Refusal] = []

    async def open_one(index: int) -> None:
        seat = circuit.seats[index]
        message = _message(circuit, index, opening, secret)
        limit_s = opening.open_s + message.wait_s
        limit_s += message.source.limit_s if message.source is not None else 0.0
        seat.opened = None
        try:
            seat.opened = await seat.stream.open(message, limit_s)
            seat.is_known, seat.source = True, None
        except BloomBeeError as error:
            refusals.append(Refusal(seat, error))

    if opening.in_turn:
        for index in sorted(range(len(circuit.seats)), key=lambda i: circuit.seats[i].peer):
            await open_one(index)
            if refusals:
                break
        return refusals
    async with asyncio.TaskGroup() as tasks:
        for index in range(len(circuit.seats)):
            tasks.create_task(open_one(index))
    return refusals


def _message(circuit: Circuit, index: int, opening: Opening, secret: bytes) -> Open:
    seat, terms = circuit.seats[index], opening.terms
    is_last = index + 1 == len(circuit.seats)
    queues = not opening.full or seat.peer in opening.full
    return Open(
        session=circuit.session,
        secret=secret,
        epoch=circuit.epoch,
        fingerprint=terms.fingerprint,
        start=seat.span.start,
        end=seat.span.end,
        sequences=terms.sequences,
        max_length=terms.max_length,
        dtype=terms.dtype,
        next=None if is_last else circuit.seats[index + 1].stream.hop,
        ring=circuit.seats[0].stream.hop if is_last and index else None,
        stages=len(circuit.seats),
        resume=seat in opening.resumed,
        wait_s=opening.wait_s if queues else 0.0,
        source=seat.source,
        prefixes=opening.prefixes,
        background=terms.background,
        lossless=terms.lossless,
    )
