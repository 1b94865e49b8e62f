"""A progress bar that shows itself only when the work takes over two seconds."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

DELAY_S = 2.0


class Progress:
    """Counts bytes towards a total; on a terminal draws a bar once DELAY_S have passed."""

    def __init__(self, what: str, total_bytes: int, *, shown: bool = True) -> None:
        console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bars.add_task(what, total=total_bytes)
        self._timer = threading.Timer(DELAY_S, self._bars.start)
        self._timer.daemon = True
        self._shown = shown and console.is_terminal

    def advance(self, count_bytes: int) -> None:
        """Count `count_bytes` more as done; any thread may."""
        self._bars.advance(self._task, count_bytes)

    def __enter__(self) -> Self:
        if self._shown:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._shown:
            self._timer.join()
            self._bars.stop()
