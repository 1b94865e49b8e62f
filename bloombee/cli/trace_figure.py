"""Where the time of steps goes as a picture: a bar a step, cut into the parts of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bloombee.cli.plan_figure import pyplot_or_error
from bloombee.cli.status_traces import PARTS
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bloombee.cli.status_traces import PhaseTrace

COLOURS = {
    "wire": "#e07a5f",
    "decode": "#f2cc8f",
    "queue": "#b8b8b8",
    "copy": "#6d597a",
    "compute": "#1f6f8b",
    "encode": "#d4a85a",
    "send": "#8d99ae",
}
HIDDEN = 0.35
"""How strong the colour of wire time is that computing hid."""


def draw_traces(traces: Mapping[str, PhaseTrace], path: Path) -> None:
    """Draw a bar for each of `traces`, in milliseconds, into a PNG.

    Raises SettingsError without matplotlib, or when the file can't be written.
    """
    pyplot = pyplot_or_error()
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.6 * len(traces)))
    for height, trace in enumerate(traces.values()):
        left = 0.0
        for stage in trace.stages:
            cut = [("wire", stage.exposed_ms, 1.0)]
            cut += [("wire", max(0.0, stage.wire_ms - stage.exposed_ms), HIDDEN)]
            cut += [(p, ms, 1.0) for p, ms in zip(PARTS[1:], stage.parts_ms[1:], strict=True)]
            begin = left
            for part, width, strength in cut:
                axes.barh(-height, width, 0.7, left, color=COLOURS[part], alpha=strength)
                left += width
            axes.plot([begin, begin], [-height - 0.4, -height + 0.4], color="black", lw=1)
    for part, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=part)
    axes.barh(0, 0, color=COLOURS["wire"], alpha=HIDDEN, label="wire, hidden")
    axes.set_yticks([-height for height in range(len(traces))], list(traces), fontsize=8)
    axes.set_xlabel("ms of the mean step; a line where a stage begins")
    axes.legend(ncols=len(COLOURS) + 1, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.25))
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SettingsError(f"can't write {path}: {error}") from error
    finally:
        pyplot.close(figure)
