"""The picture of a plan: who works for which micro-batch when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bloombee.errors import SettingsError
from bloombee.planner.rehearsal import Rehearsal, rehearse

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.cli.plan_report import PlanReport
    from bloombee.planner.jobs import Busy

TOKENS_SHOWN = 5
ROW_INCHES = 0.32
COLOURS = ("#1f6f8b", "#e07a5f", "#81b29a", "#f2cc8f", "#6d597a", "#3d5a80", "#b56576", "#8a9a5b")


def draw(report: PlanReport, path: Path) -> None:
    """Draw the first tokens of the first route in virtual time into a PNG.

    Raises SettingsError without matplotlib, or when the file can't be written.
    """
    pyplot = pyplot_or_error()
    route = report.plan.routes[0]
    shown_s = TOKENS_SHOWN * route.token_s
    outcome = rehearse(route, report.problem.workload, Rehearsal(traced_s=shown_s, rounds=1))
    rows = _rows(outcome.trace)
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + ROW_INCHES * len(rows)))
    for height, name in enumerate(rows):
        for busy in (b for b in outcome.trace if b.resource == name):
            axes.broken_barh(
                [(busy.start_s * 1e3, (busy.end_s - busy.start_s) * 1e3)],
                (len(rows) - height - 0.9, 0.8),
                color=COLOURS[busy.job % len(COLOURS)],
            )
    axes.set_yticks([len(rows) - height - 0.5 for height in range(len(rows))], rows, fontsize=8)
    axes.set_xlim(0, shown_s * 1e3)
    axes.set_xlabel("ms; one colour for each micro-batch; gaps are idle time")
    axes.set_title(
        f"{report.problem.model.name}: {route.tokens_per_s:,.1f} tokens/s, "
        f"limited by {route.bottleneck}",
        fontsize=10,
    )
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--plot: can't write {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _rows(trace: tuple[Busy, ...]) -> list[str]:
    """Resources by when they are first busy: the order of the pipeline."""
    return list(dict.fromkeys(busy.resource for busy in sorted(trace, key=lambda b: b.start_s)))


def pyplot_or_error() -> Any:  # noqa: ANN401 (matplotlib is optional and has no types here)
    """The part of matplotlib that draws into files. Raises SettingsError without it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SettingsError(
            "--plot needs matplotlib: pip install matplotlib (or bloombee[plot])"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
