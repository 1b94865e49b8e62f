"""Bars and curves of the benchmarks of shaped links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COLOURS = {
    "baseline": "tab:gray",
    "+codec": "tab:orange",
    "+micro-batches": "tab:green",
    "+both": "tab:blue",
    "auto": "tab:red",
}


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], file: Path) -> None:
    """Write `file` (PNG): panels of groups of bars, `panels[title][group][setting]` tokens/s."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 3.2 * len(panels)), squeeze=False, sharey=True
    )
    for (title, groups), axis in zip(panels.items(), axes[:, 0], strict=True):
        settings = list(next(iter(groups.values())))
        width = 0.8 / len(settings)
        for index, setting in enumerate(settings):
            at = [group + (index - (len(settings) - 1) / 2) * width for group in range(len(groups))]
            heights = [found[setting] for found in groups.values()]
            bars = axis.bar(at, heights, width * 0.95, label=setting, color=COLOURS.get(setting))
            axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylabel("tokens/s")
    axes[0, 0].legend(fontsize=8, ncols=len(COLOURS), loc="upper right")
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def draw_curves(
    curves: Mapping[str, Sequence[float]], changes_s: Sequence[float], width_s: float, file: Path
) -> None:
    """Write `file` (PNG): tokens/s over time of each setting; lines where the link changed."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(10, 4))
    for setting, speeds in curves.items():
        at = [(index + 0.5) * width_s for index in range(len(speeds))]
        axis.plot(at, speeds, label=setting, color=COLOURS.get(setting), lw=1.5)
    for change_s in changes_s:
        axis.axvline(change_s, color="black", lw=0.8, ls="--")
    axis.set_xlabel("seconds since all rows decode")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
