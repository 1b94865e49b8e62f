"""A stream whose sends and beats measure the link to its peer.

Only frames that would be sent anyway are measured, by beats behind them; an idle link gets
a small padded beat now and then. Measuring never delays a step that waits to be sent, and never
fails one: a beat that can't be sent is left out, and whoever reads the stream learns why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bloombee.errors import BloomBeeError
from bloombee.protocol.link_estimate import LEAST_BYTES
from bloombee.protocol.messages import Beat
from bloombee.telemetry import loop_us

if TYPE_CHECKING:
    from bloombee.protocol.framing import Buffer
    from bloombee.protocol.link_estimate import LinkEstimator
    from bloombee.protocol.messages import AnyMessage
    from bloombee.protocol.pulse import Pulse
    from bloombee.swarm.connection import Connection

_log = logging.getLogger(__name__)

HEAD_BYTES = 200
"""Of a frame besides its payload, and of what transports add to it, about."""
PROBE_BYTES = 12_000
"""What an idle connection carries at once, before it has to wait for word from the other side."""
PROBE_S = 0.01
"""A probe takes no longer than so, on a link whose rate is known."""
IDLE_US = 2_000_000
PROBE_EVERY_S = 20.0


@dataclass(slots=True)
class MeasuredLink:
    """One stream of a session to a peer, whose link `estimator` measures.

    As the dialer it counts its beats with `pulse`; a listener, who has none, asks with the
    number 0. Beats tell `sent_step`, if any.
    """

    connection: Connection
    session: bytes
    estimator: LinkEstimator
    pulse: Pulse | None = None
    used_us: int = 0
    """When a step was last sent."""
    _asked: set[int] = field(default_factory=set[int])

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        """As `Connection.send`; large frames may be followed by a beat."""
        size = HEAD_BYTES + (payload.nbytes if isinstance(payload, memoryview) else len(payload))
        self.used_us = now_us = loop_us()
        is_due = self.estimator.is_due(now_us, size)
        self.estimator.sending(now_us, size)
        await self.connection.send(message, payload)
        if is_due:
            try:
                await self.beat()
            except BloomBeeError as error:
                _log.debug("a step to %s goes unmeasured: %s", self.connection.remote, error)

    async def beat(self, padding: bytes = b"") -> None:
        """Ask for a sign of life; raises as `Connection.send`."""
        number = 0
        if self.pulse is not None:
            number = self.pulse.beat(self.connection.counters.bytes_sent)
        sent_us = self.estimator.mark(loop_us())
        self._asked.add(sent_us)
        await self.connection.send(Beat(self.session, number, 0, sent_us, 0, padding))

    async def probe(self) -> None:
        """Measure the rate with a little padding, if all is idle and it is long ago.

        Raises as `Connection.send`.
        """
        now_us, estimator = loop_us(), self.estimator
        if now_us - self.used_us < IDLE_US or not estimator.is_idle(now_us, IDLE_US):
            return
        if estimator.rate_age_s(now_us) < PROBE_EVERY_S:
            return
        known = estimator.bytes_per_s(now_us)
        size = PROBE_BYTES if not known else int(known * PROBE_S)
        size = max(LEAST_BYTES, min(PROBE_BYTES, size))
        estimator.probed(now_us)
        estimator.sending(now_us, size)
        await self.beat(bytes(size))

    def heard(self, beat: Beat) -> None:
        """The answer to a beat came."""
        self._asked.discard(beat.sent_us)
        if beat.sent_us and beat.heard_us:
            self.estimator.heard(beat.sent_us, beat.heard_us, loop_us())

    def forget(self) -> None:
        """The stream has ended: no answer comes any more."""
        for sent_us in self._asked:
            self.estimator.lose(sent_us)
        self._asked.clear()


def answer(beat: Beat, sent_step: int = 0) -> Beat:
    """What is said to a beat that asks; send it at once."""
    return Beat(
        beat.session, beat.number, sent_step, beat.sent_us, loop_us() if beat.sent_us else 0
    )


def asks(beat: Beat) -> bool:
    """Whether a dialer has to answer it: the listener measures its way to us."""
    return beat.number == 0 and beat.sent_us > 0 and not beat.heard_us
