"""The timeline of a pipeline: one lane a stage and link, one bar a pass or transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.pipelined.analysis import Window

if TYPE_CHECKING:
    from pathlib import Path

Lanes = Mapping[str, Sequence[tuple[float, float]]]


def draw(runs: Mapping[str, tuple[Lanes, Window]], file: Path, length_s: float) -> None:
    """Write `file` (PNG): for each run the first `length_s` of its window."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(14, 2.4 * len(runs)), squeeze=False, sharex=True
    )
    for (title, (lanes, window)), axis in zip(runs.items(), axes[:, 0], strict=True):
        _lanes(axis, lanes, Window(window.start_s, window.start_s + length_s))
        axis.set_title(title, fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("seconds since all rows decode")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _lanes(axis: Any, lanes: Lanes, window: Window) -> None:
    for lane, (name, intervals) in enumerate(lanes.items()):
        bars = [
            (max(start, window.start_s) - window.start_s, window.overlap_s(start, end))
            for start, end in intervals
            if window.overlap_s(start, end) > 0
        ]
        colour = "tab:blue" if name.startswith("stage") else "tab:orange"
        axis.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", lw=0.4)
    axis.set_yticks(range(len(lanes)), list(lanes))
    axis.set_xlim(0, window.length_s)
    axis.invert_yaxis()
