"""`bloombee-profile`: what serving a model costs on this machine, or on those of a swarm."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bloombee.cli.serving import run_to_end
from bloombee.config.flags import parse
from bloombee.config.profile import ProfileSettings
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from bloombee.protocol.report_messages import CostTable, TimeGrid

PROG = "bloombee-profile"
WIDTH_IN_PIPES = 120


@dataclass(frozen=True, slots=True)
class Shown:
    """A table and whose it is; `problem`: why there is none."""

    peer: str
    span: str
    costs: CostTable | None
    problem: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    settings = parse(
        ProfileSettings, argv, prog=PROG, description="Show what serving costs, as measured."
    )
    configure_logging("warning" if settings.json_output else settings.log_level)
    return run_to_end(PROG, lambda: show(settings))


def show(settings: ProfileSettings) -> None:
    """Print tables, or JSON.

    Raises SettingsError and ModelError for what the user can mend, SwarmError when no
    initial peer answers.
    """
    found = _of_swarm(settings) if settings.initial_peers else [_of_here(settings)]
    if settings.json_output:
        print(json.dumps([_as_json(each) for each in found], indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH_IN_PIPES)
    for each in found:
        console.print(render(each))


def _of_swarm(settings: ProfileSettings) -> list[Shown]:
    from bloombee.cli.observing import ask_swarm

    heard = ask_swarm(settings, settings.model)
    told = [
        Shown(
            each.record.peer,
            str(each.record.span),
            each.description.costs,
            "" if each.description.costs else "tells no costs",
        )
        for each in heard.answers
    ]
    silent = [line.partition(": ") for line in heard.silent]
    return told + [Shown(peer, "-", None, why) for peer, _, why in silent]


def _of_here(settings: ProfileSettings) -> Shown:
    from bloombee.config.environment import use_passive_threads
    from bloombee.config.settings import ServerSettings

    use_passive_threads()
    serving = ServerSettings(
        model=settings.model or "",
        blocks=settings.blocks,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        profile="fresh",
        profile_s=settings.seconds,
        new_swarm=True,
    )
    # torch and transformers take seconds to import: not for --help or a wrong flag.
    from bloombee.server.profile_here import profile_here

    span, profile = asyncio.run(profile_here(serving))
    return Shown("this machine", str(span), profile.table())


def _as_json(shown: Shown) -> dict[str, Any]:
    import msgspec

    costs = None if shown.costs is None else _named(shown.costs)
    grids = {"decode", "prefill", "head"}
    if shown.costs is not None and costs is not None:
        for name in grids:
            grid = getattr(shown.costs, name)
            costs[name] = None if grid is None else msgspec.structs.asdict(grid)
    return {
        "peer": shown.peer,
        "span": shown.span,
        "costs": costs,
        **({"problem": shown.problem} if shown.problem else {}),
    }


def _named(costs: CostTable) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(costs)


def render(shown: Shown) -> RenderableType:
    """One server's table for a terminal."""
    from rich.console import Group
    from rich.text import Text

    title = Text.assemble((f"{shown.peer}", "bold"), f"  blocks {shown.span}")
    costs = shown.costs
    if costs is None:
        return Group(title.append(f"  {shown.problem}\n", style="red"))
    title.append(f"  {costs.hardware}")
    parts: list[RenderableType] = [
        title,
        Text(f"a pass {costs.pass_s * 1e3:.2f} ms besides its blocks; {_means(costs)}"),
    ]
    grids = (("decode, ms a block", costs.decode), ("prefill, ms a block", costs.prefill))
    for name, grid in (*grids, ("head, ms", costs.head)):
        if grid is not None:
            parts.append(_table(name, grid))
    return Group(*parts, Text())


def _means(costs: CostTable) -> str:
    """Memory, bandwidths, prices: what is known of them."""
    words = [
        f"device memory {costs.device_bytes / 1e9:.1f} GB",
        f"a block {costs.block_bytes / 1e6:.1f} MB and {costs.kv_bytes_per_token} bytes a token",
    ]
    rates = (
        ("host to device", costs.host_device_bytes_per_s),
        ("disk", costs.disk_bytes_per_s),
    )
    words += [f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates if rate]
    words += [f"${costs.price_per_hour:g} an hour"] if costs.price_per_hour else []
    words += [f"bought for ${costs.purchase:g}"] if costs.purchase else []
    words += [f"{costs.watts:g} W declared"] if costs.watts else []
    words += [f"{costs.measured_watts:.0f} W measured"] if costs.measured_watts else []
    return ", ".join([*words, f"measured {costs.age_s / 3600:.1f} hours ago"])


def _table(name: str, grid: TimeGrid) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=name, title_justify="left")
    table.add_column("rows", justify="right")
    for context in grid.contexts:
        table.add_column(f"context {context}", justify="right")
    for rows, line in zip(grid.rows, grid.seconds, strict=True):
        table.add_row(str(rows), *(f"{seconds * 1e3:.3f}" for seconds in line))
    return table


if __name__ == "__main__":
    sys.exit(main())
