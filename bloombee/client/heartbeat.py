"""Signs of life: every stage is asked for one again and again, and missed when it is silent."""

from __future__ import annotations

import asyncio

from bloombee.client.circuit import Circuit
from bloombee.client.links import StageLink
from bloombee.config.client import ClientSettings
from bloombee.errors import DeadlineExceeded
from bloombee.planner.recovery import StallWatch, Trouble
from bloombee.protocol.machine import State

_ANSWERING = (State.OPENING, State.SESSION, State.REOPENING)


async def keep_alive(circuit: Circuit, settings: ClientSettings) -> None:
    """Beat, and report stages that are silent or sit on a step, for as long as it runs."""
    now, stalls = asyncio.get_running_loop().time, StallWatch(settings.stage_s)
    while True:
        due_s = now() + settings.heartbeat_s
        await asyncio.sleep(settings.heartbeat_s)
        late_s = now() - due_s
        links = [
            link for link in circuit.links if link.is_up and link.connection.state in _ANSWERING
        ]
        if late_s > settings.heartbeat_s:
            for link in links:
                link.heard_s += late_s  # it was us who did not listen
        for link in silent(links, now(), settings):
            _miss(link, settings.silence_s)
        async with asyncio.TaskGroup() as tasks:
            for link in links:
                tasks.create_task(link.beat(settings.heartbeat_s))
        _look_for_stalls(circuit, stalls, now())


def silent(links: list[StageLink], now_s: float, settings: ClientSettings) -> list[StageLink]:
    """Those silent for too long, and with them those about to be: it is one and the same cause.

    When our own network fails all stages fall silent within a beat. A beat waits behind
    what was sent before it, to whichever stage, since all share our uplink: so silence
    is allowed for longer while much is under way.
    """
    silence_s = settings.silence_s + sum(link.way_s for link in links)
    if all(now_s - link.heard_s <= silence_s for link in links):
        return []
    nearly_s = max(silence_s - 2 * settings.heartbeat_s, silence_s / 2)
    return [link for link in links if now_s - link.heard_s > nearly_s]


def _miss(link: StageLink, silence_s: float) -> None:
    link.silent = True
    link.lose(DeadlineExceeded(f"{link} has given no sign of life for {silence_s:g} s"))


def _look_for_stalls(circuit: Circuit, stalls: StallWatch, now_s: float) -> None:
    oldest = circuit.ledger.oldest
    due = oldest.number if oldest is not None and oldest.sent else 0
    sent = [0 if seat.link is None else seat.link.sent_step for seat in circuit.seats]
    stage = stalls.suspect(due, sent, now_s)
    if stage is None:
        return
    seat = circuit.seats[stage]
    error = DeadlineExceeded(f"blocks {seat.span} at {seat.peer[-8:]} hold a step for too long")
    circuit.note(seat, Trouble.STALLED, error)
