"""A progress bar for anything over two seconds."""

from __future__ import annotations

from threading import Timer
from typing import TYPE_CHECKING, Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from types import TracebackType

SHOWN_AFTER_S = 2.0


class Progress:
    """`with Progress("loading blocks", total) as bar: ... bar.advance(n)`.

    Draws on standard error, once the work has taken two seconds, and only on a
    terminal. `advance` may be called from any thread.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        *,
        unit: Literal["bytes", "items"] = "bytes",
        shown: bool = True,
    ) -> None:
        console = Console(stderr=True)
        count = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            count,
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bars.add_task(what, total=total)
        self._starter = Timer(SHOWN_AFTER_S, self._bars.start)
        self._starter.daemon = True
        self._shown = shown and console.is_terminal

    def advance(self, amount: int = 1) -> None:
        """`amount` more is done."""
        self._bars.advance(self._task, amount)

    def __enter__(self) -> Self:
        if self._shown:
            self._starter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._starter.cancel()
            self._starter.join()
            self._bars.stop()
