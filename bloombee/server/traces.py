"""Where the time of steps goes on this stage, summed up by session and phase; no clock in here.

Always on: a step costs a few additions. A session is known until it has been quiet
for KEPT_US, or MOST_SESSIONS others were heard of since, whether or not it is open: whoever has
generated something may ask afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import msgspec

from bloombee.core import PeerId, Span
from bloombee.protocol.messages import Timing, TraceReport
from bloombee.protocol.report_messages import MOST_TRACES

PhaseName = Literal["prefill", "decode", "verify"]

KEPT_US = 600_000_000
MOST_SESSIONS = 256
ID_BYTES = 16


class Times(msgspec.Struct, gc=False):
    """One step on this stage, filled in on its way through; microseconds.

    It came from `feeder` at `taken_us`, after `wire_us` on its way if that `is_timed`; what came
    of it was here at `ready_us`, and was handed to the transport, encoded, at `handed_us`.
    """

    feeder: PeerId
    taken_us: int
    wire_us: int = 0
    is_timed: bool = False
    decode_us: int = 0
    ready_us: int = 0
    compute_us: int = 0
    copy_us: int = 0
    exposed_us: int = 0
    encode_us: int = 0
    handed_us: int = 0

    @property
    def queue_us(self) -> int:
        """What it waited before the device was done with it."""
        known_us = self.decode_us + self.compute_us + self.copy_us
        return max(0, self.ready_us - self.taken_us - known_us)

    @property
    def waited_us(self) -> int:
        """What its result waited for its turn to be sent."""
        return max(0, self.handed_us - self.ready_us - self.encode_us)

    def timing(self, peer: PeerId) -> Timing:
        """All of it as a message."""
        return Timing(
            peer=peer,
            queue_us=self.queue_us,
            compute_us=self.compute_us,
            decode_us=self.decode_us,
            encode_us=self.encode_us,
            total_us=self.handed_us - self.taken_us,
            copy_us=self.copy_us,
            wire_us=self.wire_us,
            send_us=self.waited_us,
        )


class Moved(msgspec.Struct, gc=False):
    """What one step moved: its rows, and bytes of payload."""

    rows: int
    bytes_in: int
    bytes_out: int
    raw_bytes_out: int


class _Sums(msgspec.Struct, gc=False):
    upstream: PeerId = PeerId("")
    steps: int = 0
    timed_steps: int = 0
    rows: int = 0
    wire_us: int = 0
    decode_us: int = 0
    queue_us: int = 0
    compute_us: int = 0
    copy_us: int = 0
    encode_us: int = 0
    send_us: int = 0
    taking_us: int = 0
    span_us: int = 0
    exposed_us: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    raw_bytes_out: int = 0

    def add(self, times: Times, moved: Moved, ended_us: int) -> None:
        """One more step, whose result the transport had taken at `ended_us`."""
        taking_us = ended_us - times.handed_us
        self.upstream = times.feeder
        self.steps += 1
        self.timed_steps += times.is_timed
        self.rows += moved.rows
        self.wire_us += times.wire_us
        self.decode_us += times.decode_us
        self.queue_us += times.queue_us
        self.compute_us += times.compute_us
        self.copy_us += times.copy_us
        self.encode_us += times.encode_us
        self.send_us += times.waited_us + taking_us
        self.taking_us += taking_us
        self.span_us += ended_us - times.taken_us
        self.exposed_us += times.exposed_us
        self.bytes_in += moved.bytes_in
        self.bytes_out += moved.bytes_out
        self.raw_bytes_out += moved.raw_bytes_out


class _Session(msgspec.Struct):
    owner: PeerId
    span: Span
    phases: dict[PhaseName, _Sums]
    heard_us: int = 0


class Traces:
    """The sums of the sessions heard of last."""

    def __init__(self, most_sessions: int = MOST_SESSIONS, kept_us: int = KEPT_US) -> None:
        self._most = most_sessions
        self._kept_us = kept_us
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session: bytes, owner: PeerId, span: Span, now_us: int) -> None:
        """A session begins, or a later epoch of it; its sums go on as long as it is its owner's."""
        known = self._sessions.get(session)
        if known is None or (known.owner, known.span) != (owner, span):
            self._sessions[session] = _Session(owner, span, {}, now_us)
            self._forget(now_us)

    def note(
        self, session: bytes, phase: PhaseName, times: Times, moved: Moved, ended_us: int
    ) -> None:
        """A step of the session went through; of forgotten ones nothing is noted."""
        known = self._sessions.get(session)
        if known is None:
            return
        known.heard_us = ended_us
        sums = known.phases.get(phase)
        if sums is None:
            sums = known.phases[phase] = _Sums()
        sums.add(times, moved, ended_us)

    def reports(self, asker: PeerId, session: bytes, now_us: int) -> tuple[TraceReport, ...]:
        """Of the asker's own sessions whose id begins so; of anybody's one whose id it tells whole.

        Ids are 16 random bytes that only the client and the stages of its route know.
        """
        self._forget(now_us)
        found = [
            _report(id_, known.span, phase, sums)
            for id_, known in self._sessions.items()
            if id_.startswith(session) and (known.owner == asker or len(session) == ID_BYTES)
            for phase, sums in known.phases.items()
        ]
        return tuple(found[-MOST_TRACES:])

    def _forget(self, now_us: int) -> None:
        old = [i for i, s in self._sessions.items() if now_us - s.heard_us > self._kept_us]
        for session in old:
            del self._sessions[session]
        while len(self._sessions) > self._most:
            quiet = min(self._sessions, key=lambda each: self._sessions[each].heard_us)
            del self._sessions[quiet]


def _report(session: bytes, span: Span, phase: PhaseName, sums: _Sums) -> TraceReport:
    figures = msgspec.structs.asdict(sums)
    return TraceReport(session=session, phase=phase, start=span.start, end=span.end, **figures)
