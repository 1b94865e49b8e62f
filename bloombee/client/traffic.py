"""What a session moved, and where the time of its steps went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bloombee.core import Route, Stage
from bloombee.protocol.messages import Timing
from bloombee.transport.interface import StreamCounters


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One traced step: from sending it to its output, and each stage's share, in microseconds.

    `back_us` is the output's way to the client. A step that the servers began themselves
    is `looped`: it lasts from the output before it to its own, and `back_us` is no part of that.
    """

    round_trip_us: float
    stages: tuple[Timing, ...]
    phase: str = "decode"
    back_us: float = 0.0
    looped: bool = False

    @property
    def compute_us(self) -> float:
        """What the stages spent computing, together."""
        return sum(stage.compute_us for stage in self.stages)

    @property
    def wire_us(self) -> float:
        """What it spent on its way from machine to machine."""
        return sum(stage.wire_us for stage in self.stages) + self.back_us

    @property
    def known_us(self) -> float:
        """The sum of all parts: what is missing of `round_trip_us` is in no stage's books."""
        return self.wire_us + sum(stage.total_us for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a session: what it lost, and what it took to go on.

    `replayed_tokens` counts a token once for every stage that computed it again, and
    `replayed_bytes` the rows that entered these stages. `seconds` run from the moment
    that the loss was noticed; of these the last round took `staffing_s` until every stage had
    a server and a stream, `opening_s` until all had said what they hold, and `replaying_s`.
    """

    lost: tuple[Stage, ...]
    taken: tuple[Stage, ...]
    replayed_tokens: int
    replayed_bytes: int
    seconds: float
    staffing_s: float = 0.0
    opening_s: float = 0.0
    replaying_s: float = 0.0

    def __str__(self) -> str:
        if not self.lost and not self.taken:
            what = "linked the stages anew"
        else:
            what = f"replaced {_named(self.lost)} by {_named(self.taken)}"
        return f"{what}; {self.replayed_tokens} tokens computed again, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one session, on all streams that the client had for it; grows while it runs.

    `traces` holds a `StepTrace` for every step when the settings ask for `trace`,
    `recoveries` every recovery, `adopted` for each sequence whose prompt was announced how
    many tokens of it all stages had kept of earlier sessions, `sessions` their ids, as
    `bloombee-status --trace` takes them.
    """

    streams: list[StreamCounters] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames that the client sent."""
        return sum(stream.bytes_sent for stream in self.streams)

    @property
    def bytes_received(self) -> int:
        """Bytes of frames that the client received."""
        return sum(stream.bytes_received for stream in self.streams)

    @property
    def replayed_tokens(self) -> int:
        """Tokens that were computed again, over all recoveries and stages."""
        return sum(recovery.replayed_tokens for recovery in self.recoveries)

    @property
    def replayed_bytes(self) -> int:
        """Bytes of the rows that entered stages to be computed again."""
        return sum(recovery.replayed_bytes for recovery in self.recoveries)


@dataclass(slots=True)
class Progress:
    """Where a session runs now, and what it moved: what `model.route` and `traffic` show."""

    route: Route
    traffic: Traffic = field(default_factory=Traffic)


def _named(stages: tuple[Stage, ...]) -> str:
    return ", ".join(f"{stage.span} at {stage.peer[-8:]}" for stage in stages) or "nothing"


def merged(parts: Sequence[Traffic]) -> Traffic:
    """The traffic of several sessions as that of one."""
    if len(parts) == 1:
        return parts[0]
    return Traffic(
        [stream for part in parts for stream in part.streams],
        [trace for part in parts for trace in part.traces],
        [recovery for part in parts for recovery in part.recoveries],
        [tokens for part in parts for tokens in part.adopted],
        [session for part in parts for session in part.sessions],
    )
