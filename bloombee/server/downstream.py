"""The link to the next stage: made once an epoch has begun, watched until the next one.

Signs of life go over it both ways. When it can't be made, breaks, or falls silent,
the client is told HopLost, and decides what becomes of the session.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from bloombee.errors import BloomBeeError, HopLost, ProtocolError, TransportError
from bloombee.planner.neighbours import Neighbours
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import Attach, Attached, Beat, Failed, Hop
from bloombee.protocol.pulse import Pulse
from bloombee.server.hop_dials import HopDials
from bloombee.server.onward import Onward
from bloombee.server.sending import Sending
from bloombee.server.sessions import Session
from bloombee.server.tasks import BackgroundTasks
from bloombee.swarm.connection import Connection, ConnectionSettings, Signer
from bloombee.swarm.measured import MeasuredLink
from bloombee.swarm.warming import Warmer
from bloombee.transport.interface import Dialer, Endpoint

logger = logging.getLogger(__name__)

LINK_DEADLINE_S = 65.0
"""For the next stage to accept our Attach; it waits there for the client's own Open, which
may queue for KV. Whether that stage lives its client sees for itself."""
BEAT_S = 0.5
SILENCE_S = 4.0
SEND_DEADLINE_S = 60.0
"""How long the next stage may take to accept a step; 20 Mbit/s need half of it for a full
frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """What making links takes."""

    identity: Signer
    dialer: Dialer
    connection_settings: ConnectionSettings
    neighbours: Neighbours
    sending: Sending
    tasks: BackgroundTasks


class Downstream:
    """Links sessions to their next stages."""

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._dials = HopDials(parts.dialer, parts.identity, parts.connection_settings)
        self._warmer = Warmer(self._dials.dial)

    async def prepare(self, hop: Hop) -> None:
        """Keep the way to `hop` short for a while: it may become a next stage. Never raises."""
        await self._warmer.warm(_endpoint(hop))

    async def run(self, session: Session, onward: Onward) -> None:
        """Link `session` to its next stage, for as long as the epoch of `onward` lasts."""
        epoch = session.epoch
        attach = Attach(session.id, session.secret, epoch, ring=onward.ring)
        try:
            link = await self._connect(onward, attach)
            pulse = Pulse(SILENCE_S, asyncio.get_running_loop().time())
            estimator = self._parts.neighbours.estimator(link.remote)
            measured = MeasuredLink(link, session.id, estimator, pulse)
            try:
                await self._watch(onward, measured, pulse)
            finally:
                measured.forget()
                self._close(link)
        except HopLost as error:
            onward.lose(error)
            # A cancellation may have been lost on the way: the epoch may be over.
            if session.leads(onward):
                await self._parts.sending.fail(session, error, epoch)

    async def _connect(self, onward: Onward, attach: Attach) -> Connection:
        """A hop stream attached to the session at the next stage. Raises HopLost."""
        try:
            link = await self._dials.dial(_endpoint(onward.hop))
        except BloomBeeError as error:
            raise HopLost(f"can't reach {onward}: {error}") from None
        try:
            await _attach(link, attach)
        except BloomBeeError as error:
            self._close(link)
            raise HopLost(f"can't link to {onward}: {error}") from None
        except BaseException:
            self._close(link)
            raise
        return link

    def _close(self, link: Connection) -> None:
        """End a link without waiting for a next stage that may hear nothing."""
        self._parts.tasks.start(link.close(), "closing the link to a next stage")

    async def _watch(self, onward: Onward, link: MeasuredLink, pulse: Pulse) -> None:
        """Exchange signs of life until the link is lost; then raise HopLost.

        Steps may be sent once the first has gone, which measures an idle link.
        """
        try:
            await link.beat()
            onward.stands(link)
            async with asyncio.TaskGroup() as group:
                group.create_task(_beat(onward, link))
                await _listen(link, pulse)
        except* TimeoutError:
            raise HopLost(f"{onward} took no step for {SEND_DEADLINE_S:g} s") from None
        except* BloomBeeError as group_error:
            error = group_error.exceptions[0]
            raise HopLost(f"lost {onward}: {error}") from None


def _endpoint(hop: Hop) -> Endpoint:
    return Endpoint(hop.peer, hop.address, hop.certificate_hash)


async def _attach(link: Connection, attach: Attach) -> None:
    await link.send(attach)
    received = await link.receive(LINK_DEADLINE_S)
    if received is None:
        raise TransportError("it closed the stream")
    if isinstance(received[0], Failed):
        raise to_error(received[0])
    if not isinstance(received[0], Attached):
        raise ProtocolError(f"it answered {type(received[0]).__name__}")


async def _beat(onward: Onward, link: MeasuredLink) -> None:
    """Send signs of life, for as long as the next stage takes what is sent."""
    while True:
        await asyncio.sleep(BEAT_S)
        async with asyncio.timeout(SEND_DEADLINE_S):
            await link.beat()
            await link.probe()
        if asyncio.get_running_loop().time() - onward.sending_since_s > SEND_DEADLINE_S:
            raise TimeoutError


async def _listen(measured: MeasuredLink, pulse: Pulse) -> None:
    """Take what the next stage says; raises when it says nothing for too long, or leaves."""
    clock, link = asyncio.get_running_loop().time, measured.connection
    while True:
        wait_s = max(0.0, pulse.lost_at_s(link.counters.bytes_sent) - clock())
        try:
            async with asyncio.timeout(wait_s):
                received = await link.receive()
        except TimeoutError:
            if clock() < pulse.lost_at_s(link.counters.bytes_sent):
                continue
            raise TransportError("it gives no sign of life") from None
        if received is None:
            raise TransportError("it closed the stream")
        message = received[0]
        if isinstance(message, Failed):
            raise to_error(message)
        pulse.heard(clock(), message.number if isinstance(message, Beat) else 0)
        if isinstance(message, Beat):
            measured.heard(message)
