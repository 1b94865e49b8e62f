"""A pipeline in virtual time: jobs, queues at stages and links, KV that bounds who may run.

A job is a micro-batch of sequences on one route. It waits until every stage of its route has
KV tokens for its full length, reads its prompt in chunks that follow each other, then goes
round once a token, entering again at once. A stage computes one pass at a time; passes that
wait together may be merged. A link sends one message at a time, and delivers it a latency
later. By Little's law the tokens per second of a layout are the sequences that its KV admits
over the time that each stays, however much its stages could compute.

Deterministic: ties are broken by the order in which things were scheduled.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bloombee.planner.jobs import Busy, Job, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.planner.jobs import Course, Station, Wire


@dataclass(slots=True)
class _Pass:
    """One trip of a job's rows over its course; `stage` counts stations."""

    job: int
    rows: int
    is_prefill: bool
    is_last_chunk: bool
    stage: int = 0


@dataclass(slots=True)
class _State:
    """What changes of a job."""

    left: int
    first_s: float = -1.0
    done_s: float = -1.0


@dataclass(slots=True)
class _Queue:
    """What changes of a station."""

    waiting: deque[_Pass] = field(default_factory=lambda: deque[_Pass]())
    working: bool = False
    kv_used: int = 0
    kv_peak: int = 0
    busy_s: float = 0.0


class Simulation:
    """Runs jobs over stations and wires; `traced_s` seconds are kept for the picture."""

    def __init__(
        self,
        stations: Sequence[Station],
        wires: Sequence[Wire],
        courses: Sequence[Course],
        *,
        traced_s: float = 0.0,
    ) -> None:
        self._stations = tuple(stations)
        self._wires = tuple(wires)
        self._courses = tuple(courses)
        self._traced_s = traced_s
        self._queues = [_Queue() for _ in stations]
        self._free_s = [0.0] * len(wires)
        self._wire_busy_s = [0.0] * len(wires)
        self._events: list[tuple[float, int, int, int, list[_Pass]]] = []
        self._count = 0
        self._trace: list[Busy] = []
        self._token_times: list[tuple[float, int]] = []
        self._now_s = 0.0

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs to their end. Raises ValueError for a job that no KV can ever hold."""
        self._jobs = tuple(jobs)
        self._states = [_State(job.new_tokens) for job in jobs]
        for job in jobs:
            self._check(job)
        self._waiting = deque(sorted(range(len(jobs)), key=lambda i: jobs[i].arrival_s))
        self._admitted = self._job_seconds = 0.0
        for job in sorted({job.arrival_s for job in jobs}):
            self._schedule(job, _ADMIT, 0, [])
        while self._events:
            now, _, kind, index, passes = heapq.heappop(self._events)
            self._job_seconds += self._admitted * (now - self._now_s)
            self._now_s = now
            if kind == _ADMIT:
                self._admit()
            elif kind == _ARRIVE:
                self._arrive(index, passes)
            else:
                self._finish(index, passes)
        return self._outcome()

    def _check(self, job: Job) -> None:
        for index, wanted in self._demand(job):
            station = self._stations[index]
            if wanted > station.kv_token_blocks:
                raise ValueError(
                    f"{station.name} has KV for {station.kv_token_blocks} tokens x blocks, "
                    f"a job needs {wanted}"
                )

    def _demand(self, job: Job) -> list[tuple[int, int]]:
        """Stations of the job, and the KV that it takes on each, in tokens x blocks."""
        course = self._courses[job.course]
        return [
            (station, job.kv_tokens * blocks)
            for station, blocks in zip(course.stations, course.blocks, strict=True)
        ]

    def _schedule(self, time_s: float, kind: int, index: int, passes: list[_Pass]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, kind, index, passes))

    def _admit(self) -> None:
        """Let in whoever has arrived and finds KV on all its stations, first come first."""
        kept: deque[int] = deque()
        for index in self._waiting:
            job = self._jobs[index]
            if job.arrival_s > self._now_s or not self._has_room(job):
                kept.append(index)
                continue
            self._reserve(job, 1)
            self._start(index)
        self._waiting = kept

    def _has_room(self, job: Job) -> bool:
        return all(
            self._queues[s].kv_used + wanted <= self._stations[s].kv_token_blocks
            for s, wanted in self._demand(job)
        )

    def _reserve(self, job: Job, sign: int) -> None:
        self._admitted += sign
        for station, wanted in self._demand(job):
            queue = self._queues[station]
            queue.kv_used += sign * wanted
            queue.kv_peak = max(queue.kv_peak, queue.kv_used)

    def _start(self, index: int) -> None:
        """Send the prompt in, chunk behind chunk; without a prompt, the first token's row."""
        job = self._jobs[index]
        course = self._courses[job.course]
        left = job.rows * job.prompt_tokens
        if not left:
            self._send(course.entry, course.stations[0], _whole(index, job.rows))
        while left > 0:
            rows = min(left, job.chunk_tokens)
            left -= rows
            self._send(course.entry, course.stations[0], _chunk(index, rows, left))

    def _send(self, wire: int, station: int, item: _Pass) -> None:
        """Over the wire when it is free; it arrives a latency after it started."""
        link = self._wires[wire]
        rows = (0, item.rows) if item.is_prefill else (item.rows, 0)
        start = max(self._now_s, self._free_s[wire])
        busy = link.busy_s(*rows)
        self._free_s[wire] = start + busy
        self._wire_busy_s[wire] += busy
        self._note(link.name, item, start, start + busy)
        self._schedule(start + link.latency_s(*rows), _ARRIVE, station, [item])

    def _arrive(self, station: int, passes: list[_Pass]) -> None:
        self._queues[station].waiting.extend(passes)
        self._work(station)

    def _work(self, station: int) -> None:
        """Begin the next pass of a station that is free."""
        queue, about = self._queues[station], self._stations[station]
        if queue.working or not queue.waiting:
            return
        taken = [queue.waiting.popleft()]
        rows = taken[0].rows
        while queue.waiting and rows + queue.waiting[0].rows <= about.merged_rows:
            rows += queue.waiting[0].rows
            taken.append(queue.waiting.popleft())
        prefill = sum(item.rows for item in taken if item.is_prefill)
        blocks = max(self._blocks(item) for item in taken)
        seconds = about.seconds(blocks, rows - prefill, prefill)
        queue.working = True
        queue.busy_s += seconds
        self._note(about.name, taken[0], self._now_s, self._now_s + seconds)
        self._schedule(self._now_s + seconds, _FINISH, station, taken)

    def _blocks(self, item: _Pass) -> int:
        return self._courses[self._jobs[item.job].course].blocks[item.stage]

    def _finish(self, station: int, passes: list[_Pass]) -> None:
        self._queues[station].working = False
        for item in passes:
            course = self._courses[self._jobs[item.job].course]
            item.stage += 1
            if item.stage < len(course.stations):
                self._send(course.wires[item.stage], course.stations[item.stage], item)
            elif item.is_last_chunk:
                self._token(item, course)
        self._work(station)

    def _token(self, item: _Pass, course: Course) -> None:
        """Every sequence of the job has a token more; go round again or end."""
        state, job = self._states[item.job], self._jobs[item.job]
        if state.first_s < 0:
            state.first_s = self._now_s + course.answer_s
        state.left -= 1
        self._token_times.append((self._now_s, job.rows))
        if state.left > 0:
            self._send(course.wires[0], course.stations[0], _whole(item.job, job.rows))
            return
        state.done_s = self._now_s
        self._reserve(job, -1)
        self._admit()

    def _note(self, resource: str, item: _Pass, start_s: float, end_s: float) -> None:
        if start_s < self._traced_s and end_s > start_s:
            phase = "prefill" if item.is_prefill else "decode"
            self._trace.append(Busy(resource, item.job, start_s, end_s, phase))

    def _outcome(self) -> Outcome:
        tokens = sum(rows for _, rows in self._token_times)
        shares = {
            **{s.name: q.busy_s for s, q in zip(self._stations, self._queues, strict=True)},
            **{w.name: busy for w, busy in zip(self._wires, self._wire_busy_s, strict=True)},
        }
        end = max((time for time, _ in self._token_times), default=0.0)
        return Outcome(
            tokens,
            end,
            _steady(self._token_times, tokens),
            tuple(state.first_s for state in self._states),
            tuple(state.done_s for state in self._states),
            {name: busy / end if end else 0.0 for name, busy in shares.items()},
            tuple(queue.kv_peak for queue in self._queues),
            self._job_seconds / end if end else 0.0,
            tuple(self._trace),
        )


_ADMIT, _ARRIVE, _FINISH = range(3)


def _whole(job: int, rows: int) -> _Pass:
    """One token of every sequence of the job."""
    return _Pass(job, rows, is_prefill=False, is_last_chunk=True)


def _chunk(job: int, rows: int, left: int) -> _Pass:
    """A chunk of its prompts, with so many tokens still to come."""
    return _Pass(job, rows, is_prefill=True, is_last_chunk=left == 0)


def _steady(times: Sequence[tuple[float, int]], tokens: int) -> float:
    """Tokens a second between the first and the last quarter of all tokens."""
    seen, begin, begin_seen = 0, -1.0, 0
    for time, rows in times:
        seen += rows
        if begin < 0 and seen >= tokens / 4:
            begin, begin_seen = time, seen
        if seen >= 3 * tokens / 4 and time > begin:
            return (seen - begin_seen) / (time - begin)
    end = times[-1][0] if times else 0.0
    return tokens / end if end else 0.0
