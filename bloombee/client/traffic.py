"""What a session moved, and where the time of its steps went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bloombee.protocol.messages import Timing
from bloombee.transport.interface import StreamCounters


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One traced step: from sending it to its output, and each stage's share, in microseconds."""

    round_trip_us: float
    stages: tuple[Timing, ...]

    @property
    def compute_us(self) -> float:
        """What the stages spent computing, together."""
        return sum(stage.compute_us for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one session, on the client's streams to all stages; grows while it runs.

    `traces` holds a `StepTrace` for every step when the settings ask for `trace`.
    """

    streams: Sequence[StreamCounters]
    traces: list[StepTrace] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames that the client sent."""
        return sum(stream.bytes_sent for stream in self.streams)

    @property
    def bytes_received(self) -> int:
        """Bytes of frames that the client received."""
        return sum(stream.bytes_received for stream in self.streams)
