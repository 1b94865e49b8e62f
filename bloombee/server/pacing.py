"""An executor for benchmarks: paced like a slower device, and writing down its passes.

Two cores can't show three busy stages. Paced ones can: each computes a decode pass at
full speed, then sleeps until it has taken `pace` times the least processor time that a
pass of its kind has needed so far: what disturbs one pass disturbs no figure. Of a kind are
passes of as many rows through as many blocks, with about as much context.
What they show of overlap is real, and all of them together stay within the machine.
Devices that are to be alike are told what passes need, by rows, instead of measuring it.
Passes of prompts are not slowed: what is measured comes after them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from bloombee.kv.interface import KVPool
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.forward import Failure, Run
from bloombee.server.work import PROFILER, Model
from bloombee.telemetry import cpu_us, now_us


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass: when it ran (monotonic clock of the machine), and how much of what.

    `cpu_us` is the processor time that it counts with, `steps` how many steps it merged.
    """

    started_us: int
    ended_us: int
    cpu_us: int
    steps: int
    decode_tokens: int
    prompt_tokens: int


class Diary:
    """Writes the passes of one server to `file`, as JSON lines, as they end."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("wb", buffering=0)

    def note(self, entry: Pass) -> None:
        """Write one pass. Raises OSError."""
        self._file.write(msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_diary(file: Path) -> list[Pass]:
    """The passes in a file that a `Diary` writes, those that were written so far."""
    whole = file.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Pass) for line in whole.splitlines()]


Needs = tuple[tuple[int, int], ...]
"""Microseconds of processor time by rows of a pass, rows ascending; at least one."""


def read_needs(file: Path) -> Needs:
    """What a benchmark has written, as JSON. Raises OSError, or msgspec's DecodeError."""
    return msgspec.json.decode(file.read_bytes(), type=Needs)


def needed(needs: Needs, rows: int) -> float:
    """What so many rows need: on straight lines between what is told, level beyond its ends."""
    if rows <= needs[0][0]:
        return needs[0][1]
    for (less, low_us), (more, high_us) in pairwise(needs):
        if rows <= more:
            return low_us + (high_us - low_us) * (rows - less) / (more - less)
    return needs[-1][1]


@dataclass(frozen=True, slots=True)
class _Kind:
    rows: int
    blocks: int
    choices: int
    context_bits: int


def _kind(runs: Sequence[Run]) -> _Kind:
    work = [run.waiting.work for run in runs]
    context = sum(sum(each.table.first_positions) for each in work)
    choices = sum(len(each.choosers) for each in work)
    rows = sum(run.tokens for run in runs)
    return _Kind(rows, len(work[0].span), choices, context.bit_length())


class PacedExecutor(Executor):
    """Takes `pace` times as long for a decode pass as it needs; notes all passes in `diary`.

    Those of the server's own profile are left out. Once there is a file `needs`, passes need
    what it says.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        settings: ExecutorSettings,
        *,
        pace: float = 1.0,
        diary: Diary | None = None,
        needs: Path | None = None,
    ) -> None:
        super().__init__(model, pool, settings)
        self._pace = pace
        self._diary = diary
        self._needs_file = needs
        self._needs: Needs = ()
        self._least_us: dict[_Kind, int] = {}
        self._never = threading.Event()

    async def stop(self, deadline_s: float) -> None:
        """As `Executor.stop`."""
        await super().stop(deadline_s)
        if self._diary is not None:
            self._diary.close()

    def _compute(self, runs: Sequence[Run]) -> list[Failure]:
        started_us, began_us = now_us(), cpu_us()
        failures = super()._compute(runs)
        needed_us = cpu_us() - began_us
        prompts = sum(run.tokens for run in runs if run.waiting.item.is_prompt)
        rest = sum(run.tokens for run in runs) - prompts
        if not prompts:
            needed_us = self._counted_us(runs, rest, needed_us)
        left_us = started_us + self._pace * needed_us - now_us()
        if self._pace > 1 and not prompts and left_us > 0:
            self._never.wait(left_us / 1e6)
        if self._diary is not None and runs[0].waiting.work.client != PROFILER:
            entry = Pass(started_us, now_us(), needed_us, len(runs), rest, prompts)
            self._diary.note(entry)
        return failures

    def _counted_us(self, runs: Sequence[Run], rows: int, needed_us: int) -> int:
        if self._needs_file is not None and not self._needs and self._needs_file.exists():
            self._needs = read_needs(self._needs_file)
        if self._needs:
            return round(needed(self._needs, rows))
        kind = _kind(runs)
        least_us = self._least_us[kind] = min(needed_us, self._least_us.get(kind, needed_us))
        return least_us
