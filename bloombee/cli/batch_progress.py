"""How far a batch is: a bar on a terminal, else a line in the log now and then."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bloombee.telemetry import Stopwatch

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


class BatchProgress:
    """`lines` in all, of which `answered` were when it began. A context manager."""

    def __init__(self, lines: int, answered: int) -> None:
        self._lines = lines
        self._begun = answered
        self.answered = answered
        self.failed = 0
        self.tokens = 0
        self._watch = Stopwatch()
        self._logged_s = 0.0
        console = Console(stderr=True)
        self._bars: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bars = Progress(*columns, console=console)
            self._task = self._bars.add_task("", total=lines, completed=answered)

    def count_token(self) -> None:
        """One token more; called in one thread only."""
        self.tokens += 1
        if self._bars is not None and self.tokens % 16 == 0:
            self._show(self._bars)

    def count_line(self, *, failed: bool) -> None:
        """One line more is answered, or failed."""
        self.answered += not failed
        self.failed += failed
        if self._bars is not None:
            self._show(self._bars)
        elif self._watch.elapsed_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._watch.elapsed_s
            _log.info("%d of %d lines, %s", self._done, self._lines, self.summary())

    @property
    def _done(self) -> int:
        return self.answered + self.failed

    @property
    def left_s(self) -> float | None:
        """How long the rest will take at this rate; None before the first line."""
        here = self._done - self._begun
        left = self._lines - self._done
        return self._watch.elapsed_s / here * left if here else None

    @property
    def tokens_per_s(self) -> float:
        """Over all of this run."""
        return self.tokens / max(self._watch.elapsed_s, 1e-9)

    def summary(self) -> str:
        """Rate, time left and failures, for people."""
        parts = [f"{self.tokens_per_s:.1f} tokens/s"]
        if (left_s := self.left_s) is not None and self._done < self._lines:
            parts.append(f"{_clock(left_s)} left")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return ", ".join(parts)

    def _show(self, bars: Progress) -> None:
        bars.update(self._task, completed=self._done, description=self.summary())

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
