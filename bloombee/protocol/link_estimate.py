"""What the answers to beats tell of one link: round trip, clock offset, and its rate.

A link is taken for a queue that serves first what came first. The answer to a beat says when
the other side read it (`heard_us`, by its own clock), and so when all that was sent before
had come. A beat on an idle link takes `base_us` by these two clocks, whatever their offset.
One that follows a step, a mark, comes later by the time that the step occupied the link:

    service = heard - max(heard of the mark before, begin of sending + base)

The way back, which may be busy with something else, plays no part in it. A busy receiver reads
late: a link that was idle then looks slower than it is, so that the fastest of a few
services counts; on one with a queue, what one mark was read too late the next one seems to
have come too fast, so that they are summed. Of the last few chunks of services the second fastest
counts: one alone, whatever went wrong with it, moves nothing.
No clock in here: times are passed in, in microseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LEAST_BYTES = 4096
"""Frames below say nothing of a rate: they are neither marked nor counted."""
HANDLING_US = 100
"""What reading a step and sending it costs besides the link, about."""
SHORTEST_US = 50
CHUNK_US, CHUNK_SERVICES = 30_000, 4
CHUNKS = 4
"""How many chunks are kept, of as many services as fill the one or the other."""
SLOW_US, OFTEN_US, SELDOM_US = 2_000, 20_000, 250_000
"""After a service as slow as this, or a surprise, marks may follow each other more often."""
SURPRISE = 3.0
"""So many times faster or slower than expected."""
NEW_SERVICES = 8
"""Until then every step is marked."""
WINDOW_US, SLOT_US = 15_000_000, 400_000
"""How long a beat counts for the round trip; of those within a slot the fastest does."""
EXPIRES_US = 120_000_000
MOST_MARKS = 64
STALLED_US, STALLED = 500_000, 4
"""A mark is overdue after so long, if that is also so many times what was expected."""


@dataclass(slots=True)
class _Mark:
    """What was sent between the mark before and this one."""

    count_bytes: int
    first_us: int
    last_us: int
    is_idle: bool


@dataclass(slots=True)
class _Chunk:
    count_bytes: int = 0
    service_us: int = 0
    services: int = 0
    fastest: float = 0.0
    """Of its services that found the link idle, in bytes a second."""

    def add(self, count_bytes: int, service_us: int, *, was_idle: bool) -> None:
        self.count_bytes += count_bytes
        self.service_us += service_us
        self.services += 1
        if was_idle:
            self.fastest = max(self.fastest, count_bytes / service_us * 1e6)

    @property
    def is_full(self) -> bool:
        return self.service_us >= CHUNK_US or self.services >= CHUNK_SERVICES

    @property
    def bytes_per_s(self) -> float:
        return max(self.fastest, self.count_bytes / self.service_us * 1e6)


class LinkEstimator:
    """The link to one peer, over whatever streams.

    Whoever sends calls `sending` before each frame, and `mark` for each beat, whose
    `sent_us` it gives; then `heard` with the answer.
    """

    def __init__(self) -> None:
        self.samples = 0
        """Services so far."""
        self._marks: dict[int, _Mark] = {}
        self._there: deque[tuple[int, int]] = deque()
        self._back: deque[tuple[int, int]] = deque()
        self._chunks: deque[_Chunk] = deque(maxlen=CHUNKS)
        self._open = _Chunk()
        self._bytes = 0
        self._first_us = self._last_us = 0
        self._marked_us = 0
        self._last_heard_us = 0
        self._measured_us = self._served_us = 0
        self._probed_us = 0
        self._service_us = 0
        self._is_clean = self._is_surprised = False
        self._clock_us: int | None = None
        self._is_clock_new = True

    # Sending -------------------------------------------------------------------------

    def sending(self, now_us: int, count_bytes: int) -> None:
        """A frame of that size begins to be sent."""
        if count_bytes < LEAST_BYTES:
            return
        if not self._bytes:
            self._first_us = now_us
        self._bytes += count_bytes
        self._last_us = now_us

    def is_due(self, now_us: int, count_bytes: int) -> bool:
        """Whether a mark should follow a frame of that size."""
        if count_bytes < LEAST_BYTES or len(self._marks) >= MOST_MARKS:
            return False
        if not self._is_clean or self.samples < NEW_SERVICES:
            return True
        often = self._service_us >= SLOW_US or self._is_surprised
        every_us = OFTEN_US if often else SELDOM_US
        return now_us - self._marked_us >= every_us

    def is_idle(self, now_us: int, idle_us: int) -> bool:
        """Whether nothing is under way, and no large frame was sent for so long."""
        return not self._marks and now_us - self._last_us >= idle_us

    def probed(self, now_us: int) -> None:
        """An idle link is about to be given something to carry."""
        self._probed_us = now_us

    def mark(self, now_us: int) -> int:
        """The `sent_us` of a beat that is sent now."""
        sent_us = max(now_us, self._marked_us + 1)  # each has its own
        for old in [each for each in self._marks if sent_us - each > EXPIRES_US]:
            self.lose(old)
        if len(self._marks) < MOST_MARKS:
            is_idle = not self._bytes and not self._marks
            self._marks[sent_us] = _Mark(self._bytes, self._first_us, self._last_us, is_idle)
            self._is_clean = not self._bytes or self._first_us == self._last_us
            self._bytes = 0
        self._marked_us = sent_us
        return sent_us

    def lose(self, sent_us: int) -> None:
        """No answer will come to that mark: its stream has ended."""
        lost = self._marks.pop(sent_us, None)
        if lost is None or not lost.count_bytes:
            return
        later = next((mark for at, mark in self._marks.items() if at > sent_us), None)
        if later is not None:
            later.count_bytes = 0  # how long that took can't be told any more
        else:
            self._bytes = 0

    # Answers -------------------------------------------------------------------------

    def heard(self, sent_us: int, heard_us: int, now_us: int) -> None:
        """The answer to a mark came; unknown ones are ignored."""
        mark = self._marks.get(sent_us)
        if mark is None:
            return
        is_oldest = next(iter(self._marks)) == sent_us
        del self._marks[sent_us]
        if is_oldest and mark.count_bytes:
            self._serve(mark, heard_us, now_us)
        if mark.is_idle:
            _note(self._there, now_us, heard_us - sent_us)
            self._measured_us = now_us
        _note(self._back, now_us, now_us - heard_us)
        self._is_clock_new = True
        self._last_heard_us = max(self._last_heard_us, heard_us)

    def _serve(self, mark: _Mark, heard_us: int, now_us: int) -> None:
        if not self._there or heard_us <= self._last_heard_us:
            return
        base_us = _low(self._there)
        start_us = max(self._last_heard_us, mark.first_us + base_us)
        if mark.first_us != mark.last_us and mark.last_us + base_us > start_us:
            return  # it may have been idle between two of the frames
        service_us = max(SHORTEST_US, heard_us - start_us - HANDLING_US)
        known, now = self.bytes_per_s(now_us), mark.count_bytes / service_us * 1e6
        self._is_surprised = not known / SURPRISE < now < known * SURPRISE
        self._service_us = service_us
        self._measured_us = self._served_us = now_us
        self.samples += 1
        was_idle = start_us > self._last_heard_us
        self._open.add(mark.count_bytes, service_us, was_idle=was_idle)
        if self._open.is_full:
            self._chunks.append(self._open)
            self._open = _Chunk()

    # What is known -------------------------------------------------------------------

    @property
    def rtt_s(self) -> float:
        """There and back without a queue; 0 while it is unknown."""
        if not self._there or not self._back:
            return 0.0
        return max(1e-6, (_low(self._there) + _low(self._back)) / 1e6)

    @property
    def offset_s(self) -> float:
        """The peer's clock minus ours, if both ways take as long; 0 while it is unknown."""
        if not self._there or not self._back:
            return 0.0
        return (_low(self._there) - _low(self._back)) / 2e6

    @property
    def clock_us(self) -> int | None:
        """The peer's clock minus ours, for times of single steps; None while it is unknown.

        0 when both may be one clock: a difference below half a round trip shows in nothing
        else, and clocks of different machines are further apart. Cheap between two answers.
        """
        if self._is_clock_new and self._there:
            there, back = _low(self._there), _low(self._back)
            offset_us = (there - back) // 2
            self._clock_us = 0 if abs(offset_us) <= (there + back) // 2 + HANDLING_US else offset_us
            self._is_clock_new = False
        return self._clock_us

    def bytes_per_s(self, now_us: int) -> float:
        """From here to there; 0 while it is unknown or too old to be true."""
        chunks = sorted((chunk.bytes_per_s for chunk in self._known()), reverse=True)
        if not chunks or now_us - self._served_us > EXPIRES_US:
            return 0.0
        return self._bounded(chunks[1 if len(chunks) > 2 else 0], now_us)  # noqa: PLR2004

    def age_s(self, now_us: int) -> float:
        """Since the last measurement, of anything; infinite before the first."""
        return (now_us - self._measured_us) / 1e6 if self._measured_us else float("inf")

    def rate_age_s(self, now_us: int) -> float:
        """Since the rate was last measured, or tried; infinite before the first time."""
        newest_us = max(self._served_us, self._probed_us)
        return (now_us - newest_us) / 1e6 if newest_us else float("inf")

    def _known(self) -> list[_Chunk]:
        if self._chunks or not self._open.services:
            return list(self._chunks)
        return [self._open]

    def _bounded(self, bytes_per_s: float, now_us: int) -> float:
        """Not more than what is under way for far too long allows."""
        oldest = next((mark for mark in self._marks.values() if mark.count_bytes), None)
        if oldest is None:
            return bytes_per_s
        waited_us = now_us - oldest.first_us - self.rtt_s * 1e6
        under_way = sum(mark.count_bytes for mark in self._marks.values()) + self._bytes
        expected_us = under_way / bytes_per_s * 1e6
        if waited_us < max(STALLED_US, STALLED * expected_us):
            return bytes_per_s
        return min(bytes_per_s, under_way / waited_us * 1e6)


def _note(values: deque[tuple[int, int]], now_us: int, value: int) -> None:
    """Keep a value: the least of each slot, and none that is too old but the newest."""
    while values and now_us - values[0][0] > WINDOW_US:
        values.popleft()
    if values and now_us - values[-1][0] < SLOT_US:
        values[-1] = (values[-1][0], min(values[-1][1], value))
    else:
        values.append((now_us, value))


def _low(values: deque[tuple[int, int]]) -> int:
    """The least, of many the second least: no single one decides."""
    ordered = sorted(value for _, value in values)
    return ordered[1 if len(ordered) > 4 else 0]  # noqa: PLR2004
