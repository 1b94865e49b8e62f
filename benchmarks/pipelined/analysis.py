"""What a run shows: tokens/s, how busy each stage and link was, and the pipeline's bound.

A resource is a stage or a directed link. What it is busy with for one token, on average,
bounds tokens/s; the busiest bounds them most. So the share of the time that the busiest
resource was busy is the share of the bound that was reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.pipelined.client import Answer
    from bloombee.server.pacing import Pass


@dataclass(frozen=True, slots=True)
class Window:
    """What is looked at: seconds on the machine's monotonic clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """How much of an interval lies inside."""
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link: `bits_per_s` (None: unshaped), and bytes of a row on it."""

    name: str
    bits_per_s: float | None
    row_bytes: int

    def wire_s(self, rows: int) -> float:
        """How long so many rows occupy it."""
        return 0.0 if self.bits_per_s is None else rows * self.row_bytes * 8 / self.bits_per_s


@dataclass(frozen=True, slots=True)
class Shown:
    """The figures of one run. `busy` is the share of the window, by resource."""

    tokens_per_s: float
    busy: dict[str, float]
    rows_per_pass: float

    @property
    def of_bound(self) -> float:
        """Tokens/s over what the busiest resource allows at these pass sizes."""
        return max(self.busy.values())

    @property
    def bottleneck(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda name: self.busy[name])


def steady(answer: Answer, after_s: float) -> Window:
    """From when all rows decode (and `after_s`) until the first of them is done."""
    begins_s = max(after_s, *(times[0] for times in answer.times_s))
    return Window(begins_s, min(times[-1] for times in answer.times_s))


def tokens_in(answer: Answer, window: Window) -> int:
    """Tokens that came in the window."""
    return sum(window.start_s < at <= window.end_s for times in answer.times_s for at in times)


def busy_s(passes: Iterable[Pass], window: Window) -> float:
    """How long a stage computed in the window."""
    return sum(window.overlap_s(p.started_us / 1e6, p.ended_us / 1e6) for p in passes)


def transfers(
    passes: Sequence[Pass], link: Link, since_s: float = 0.0
) -> list[tuple[float, float]]:
    """When each pass's rows occupied the link behind the stage: first come, first served.

    Passes before `since_s` met a link of full speed.
    """
    intervals: list[tuple[float, float]] = []
    free_s = 0.0
    for each in passes:
        if each.ended_us / 1e6 < since_s:
            continue
        start_s = max(free_s, each.ended_us / 1e6)
        free_s = start_s + link.wire_s(each.decode_tokens)
        intervals.append((start_s, free_s))
    return intervals


def shown(
    answer: Answer, stages: Sequence[Sequence[Pass]], links: Sequence[Link], after_s: float
) -> Shown:
    """The figures of a run; `links[i]` leaves stage i."""
    window = steady(answer, after_s)
    busy = {
        f"stage {index}": busy_s(passes, window) / window.length_s
        for index, passes in enumerate(stages)
    }
    for link, passes in zip(links, stages, strict=False):
        wire_s = sum(window.overlap_s(*interval) for interval in transfers(passes, link, after_s))
        busy[link.name] = wire_s / window.length_s
    inside = [p for p in stages[-1] if window.overlap_s(p.started_us / 1e6, p.ended_us / 1e6)]
    rows = [p.decode_tokens for p in inside if p.decode_tokens]
    return Shown(tokens_in(answer, window) / window.length_s, busy, sum(rows) / max(1, len(rows)))
