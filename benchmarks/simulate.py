"""A swarm under churn, in virtual time: our placement beside Petals' rule on the same trace.

Servers come and vanish with heavy-tailed lifetimes (Weibull, shape 0.5); speeds, lines and
memory are heavy-tailed too (log-normal). A server downloads its blocks when it comes and
whenever it moves. In the middle all servers that hold one block vanish at once. The policies
are the ones that servers call (`planner.placement`, `planner.moves`), played by
`planner.churn`; what the swarm serves is what its weakest block does, nothing while a block
has no holder. No network and no model: ratios between rules on the same trace.

    python -m benchmarks.simulate [--peers 10 30 100 1000] [--hours 6] [--seeds 3] [--quick]

`--quick` takes 10, 30 and 100 servers, three hours and one seed: seconds. The default takes
a few minutes; 1,000 servers take about ten seconds for an hour of theirs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from bloombee.planner.churn import TICK_S, Churn, History, Loss, Rule, Visitor
from bloombee.planner.rules import Greedy, Ours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCKS = 80
BLOCK_GBIT = 3.6
"""Llama-70B in 4 bits."""
LIFE_H = 2.0
LIFE_SHAPE = 0.5
AWAY_S = 600.0
WARM_S = 3600.0
console = Console(width=140)


@dataclass(frozen=True)
class Scale:
    """How many servers, how long, and how many blocks one takes at the median."""

    peers: int
    hours: float
    width: int

    @classmethod
    def of(cls, peers: int, hours: float) -> Scale:
        """Few servers have to take many blocks each, or they would never cover the model."""
        return cls(peers, hours, max(8, min(40, 240 // peers)))

    @property
    def until_s(self) -> float:
        return WARM_S + self.hours * 3600


def trace(scale: Scale, seed: int) -> list[Visitor]:
    """Servers in `peers` places: one that vanishes is followed by another after a while."""
    draw = np.random.default_rng(seed)
    mean_s = LIFE_H * 3600 / math.gamma(1 + 1 / LIFE_SHAPE)
    visitors: list[Visitor] = []
    for place in range(scale.peers):
        arrives_s = float(draw.uniform(0, AWAY_S))
        while arrives_s < scale.until_s:
            lives_s = 60 + mean_s * float(draw.weibull(LIFE_SHAPE))
            width = int(np.clip(draw.lognormal(math.log(scale.width), 0.4), 2, BLOCKS))
            block_s = draw.lognormal(math.log(0.004), 0.8)
            mbps = min(1000.0, draw.lognormal(math.log(150), 1.0))
            name = f"{place:05}-{len(visitors):06}"
            tokens_per_s, load_s = 1 / (width * block_s), 5 + width * BLOCK_GBIT * 1000 / mbps
            dies_s = arrives_s + lives_s
            visitors.append(Visitor(name, arrives_s, dies_s, width, tokens_per_s, load_s))
            arrives_s = dies_s + float(draw.exponential(AWAY_S))
    return visitors


def rules(seed: int) -> list[Rule]:
    """Each with random numbers of its own."""
    one, other = np.random.default_rng(seed + 1), np.random.default_rng(seed + 2)
    return [
        Ours(one.random),
        Ours(one.random, name="ours, none moves", moves_at_all=False),
        Greedy(lambda count: other.random(count), TICK_S),
    ]


def play(scale: Scale, seed: int) -> dict[str, History]:
    """One trace under every rule."""
    visitors = trace(scale, seed)
    loss = Loss(WARM_S + scale.hours * 1800, BLOCKS // 2, max(3, scale.peers // 10))
    found = {}
    for rule in rules(seed):
        found[rule.name] = Churn(BLOCKS, visitors, rule, WARM_S).run(scale.until_s, loss)
    return found


def report(scale: Scale, runs: Sequence[dict[str, History]], took_s: float) -> None:
    """Medians over the seeds."""
    table = Table(
        title=f"{scale.peers} places of about {scale.width} of {BLOCKS} blocks, {scale.hours:g} h, "
        f"median of {len(runs)} traces ({took_s:.0f} s)",
        title_justify="left",
    )
    for column in (
        *("rule", "tokens/s", "x ours", "time with a gap", "gap blocks x s / h"),
        *("moves/h", "a gap heals in", "95 %", "the loss heals in"),
    ):
        table.add_column(column, justify="left" if column == "rule" else "right")
    ours = [run["ours"].mean_tokens_per_s for run in runs]
    for name in runs[0]:
        mine = [run[name] for run in runs]
        share = [h.mean_tokens_per_s / o for h, o in zip(mine, ours, strict=True) if o > 0]
        heals = sorted(value for h in mine for value in h.heals_s)
        losses = [h.loss_s for h in mine if h.loss_s is not None]
        table.add_row(
            name,
            f"{median(h.mean_tokens_per_s for h in mine):.1f}",
            f"{median(share):.2f}" if share else "-",
            f"{median(h.gap_s / h.counted_s for h in mine):.1%}",
            f"{median(h.gap_block_s / h.counted_s * 3600 for h in mine):,.0f}",
            f"{median(h.moves / h.counted_s * 3600 for h in mine):.1f}",
            seconds(heals[len(heals) // 2]) if heals else "no gap",
            seconds(heals[int(len(heals) * 0.95)]) if heals else "no gap",
            seconds(median(losses)) if losses else "no gap",
        )
    console.print(table)


def seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f} s"


def draw_picture(found: dict[Scale, dict[str, History]], path: Path) -> None:
    """Tokens/s over time, one row for each size, of the first trace."""
    try:
        import matplotlib as mpl
    except ImportError:
        console.print("no picture: matplotlib is missing (scripts/setup-venv dev installs it)")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(found), 1, figsize=(10, 2.6 * len(found)), squeeze=False, layout="constrained"
    )
    for axis, (scale, histories) in zip(axes[:, 0], found.items(), strict=True):
        for name, history in histories.items():
            hours = [at / 3600 for at in history.times_s]
            axis.plot(hours, history.tokens_per_s, label=name, linewidth=1)
        axis.set_title(f"{scale.peers} places", loc="left", fontsize=9)
        axis.set_ylabel("tokens/s, weakest block")
    axes[0, 0].legend(fontsize=8)
    axes[-1, 0].set_xlabel("hours (what is counted begins with the second)")
    figure.savefig(path, dpi=120)
    console.print(f"picture: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 30, 100, 1000])
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first trace")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", type=Path, default=Path("simulate.png"))
    options = parser.parse_args(argv)
    if options.quick:
        options.peers, options.hours, options.seeds = [10, 30, 100], 3.0, 1
    pictures: dict[Scale, dict[str, History]] = {}
    clock: Callable[[], float] = time.monotonic
    for peers in options.peers:
        scale, begun_s = Scale.of(peers, options.hours), clock()
        runs = [play(scale, options.seed + 100 * index) for index in range(options.seeds)]
        pictures[scale] = runs[0]
        report(scale, runs, clock() - begun_s)
    draw_picture(pictures, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
