"""How long a killed server holds up a session, and what its recovery moves.

Three stages, each held twice. A session generates; a stage is killed (-9) between two
tokens; the next token comes from the rest of the session and a stage rebuilt elsewhere.
Measured, in turn, for the first, middle and last stage and each prefix length:

- from the kill to the next token, and of that the time that the kernel takes to end the
  process (it closes the connections last), from then until the loss was noticed, the
  recovery (of it: servers chosen and dialed, all stages opened, rows replayed), and the step;
- tokens computed again, and bytes of the rows that travelled for it;
- the same after starting over: a new session over the remaining servers, whole prompt;
- that stage's own time of computing what was lost, the prompt and the tokens since, in
  one pass, alone on its core, from a traced run.

Target: recovery takes at most 1.3 x that compute time, plus detection, and moves at
most the lost stage's rows. Prints medians and draws them.

    python -m benchmarks.recovery [--prefix 128 1024] [--rounds 5] [--picture recovery.png]
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.worker import prompts
from bloombee.cli.local_swarm import LocalSwarm, equal_spans
from bloombee.client.auto import LocalShare
from bloombee.config.client import ClientSettings
from bloombee.models import open_source, resolve_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGES = ("first", "middle", "last")
AT_TOKEN = 8
NEW_TOKENS = 16
FACTOR = 1.3
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
console = Console(width=150)


@dataclass(frozen=True)
class Case:
    """Which stage dies, after how many tokens of prompt."""

    stage: int
    prefix: int


@dataclass(frozen=True)
class Measured:
    """One kill. Times in seconds, from the kill to the next token and its parts."""

    total_s: float
    dying_s: float
    detection_s: float
    recovery_s: float
    staffing_s: float
    opening_s: float
    replaying_s: float
    step_s: float
    restart_s: float
    compute_s: float
    replayed_tokens: int
    replayed_bytes: int
    lost_bytes: int
    same: bool

    @property
    def ratio(self) -> float:
        """The recovery, from noticing the loss on, over the stage's own compute."""
        return self.recovery_s / self.compute_s


class Killing(LogitsProcessor):
    """Notes when each token's logits came, and kills a stage once `AT_TOKEN` are there."""

    def __init__(self, kill: Any) -> None:
        self.times: list[float] = []
        self.killed_s = 0.0
        self.gone_s = 0.0
        self._kill = kill

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        if len(self.times) == AT_TOKEN:
            self.killed_s = time.perf_counter()
            self._kill()
            self.gone_s = time.perf_counter()
        return scores


class Bench:
    """The swarm, a client that is disturbed, and one that traces whole prompts."""

    def __init__(self, swarm: LocalSwarm, share: LocalShare, stack: ExitStack) -> None:
        peers = tuple(swarm.initial_peers)
        self._swarm = swarm
        self._client: Any = share.join(peers)
        stack.callback(self._client.close)
        # One step a prompt: the stages compute it one after the other, each alone.
        alone = ClientSettings(trace=True, prefill_tokens=1 << 20)
        self._tracer: Any = share.join(peers, settings=alone)
        stack.callback(self._tracer.close)
        self._answers: dict[int, list[list[int]]] = {}

    def measure(self, case: Case) -> Measured:
        """Kill a stage of a running session, once; all servers run again afterwards."""
        ids = prompts(1, case.prefix, self._client.config.vocab_size)
        if case.prefix not in self._answers:
            plain = self._client.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)
            self._answers[case.prefix] = plain.tolist()
        held = case.prefix + AT_TOKEN - 1
        compute_s = self._compute_s(torch.tensor(self._answers[case.prefix])[:, :held], case.stage)
        killed: list[int] = []

        def kill() -> None:
            killed.append(self._swarm.index_of(self._client.route.stages[case.stage].peer))
            self._swarm.kill(killed[0])

        killing = Killing(kill)
        found = self._client.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            logits_processor=LogitsProcessorList([killing]),
            **GREEDY,
        )
        moved = self._client.traffic
        restart_s = self._start_over(found[:, : case.prefix + AT_TOKEN])
        self._swarm.restart(*killed)
        gaps = [b - a for a, b in zip(killing.times, killing.times[1:], strict=False)]
        step_s = median(gaps[: AT_TOKEN - 1])
        total_s = killing.times[AT_TOKEN] - killing.killed_s
        dying_s = killing.gone_s - killing.killed_s
        recovery_s = sum(each.seconds for each in moved.recoveries)
        return Measured(
            total_s=total_s,
            dying_s=dying_s,
            detection_s=max(0.0, total_s - dying_s - recovery_s - step_s),
            recovery_s=recovery_s,
            staffing_s=sum(each.staffing_s for each in moved.recoveries),
            opening_s=sum(each.opening_s for each in moved.recoveries),
            replaying_s=sum(each.replaying_s for each in moved.recoveries),
            step_s=step_s,
            restart_s=restart_s,
            compute_s=compute_s,
            replayed_tokens=moved.replayed_tokens,
            replayed_bytes=moved.replayed_bytes,
            lost_bytes=(case.prefix + AT_TOKEN) * self._client.config.hidden_size * 4,
            same=found.tolist() == self._answers[case.prefix],
        )

    def _compute_s(self, ids: torch.Tensor, stage: int) -> float:
        """What one stage computes of this prompt, in seconds."""
        self._tracer.generate(ids, max_new_tokens=1, **GREEDY)
        trace = self._tracer.traffic.traces[0]
        return trace.stages[stage].compute_us / 1e6

    def _start_over(self, ids: torch.Tensor) -> float:
        """A new session over what is left: seconds to its first token."""
        started = time.perf_counter()
        self._client.generate(ids, max_new_tokens=1, **GREEDY)
        return time.perf_counter() - started


def run(options: argparse.Namespace) -> dict[Case, list[Measured]]:
    """All cases, interleaved."""
    source = open_source(options.model)
    spans = equal_spans(source.num_blocks, len(STAGES)) * 2
    dtype = resolve_dtype("float32", source, "cpu")
    # Kept prompts would spare servers what is to be measured: computing.
    flags = ("--dtype", "float32", "--threads", "1", "--prefix-bytes", "0")
    cases = [Case(stage, prefix) for prefix in options.prefix for stage in range(len(STAGES))]
    measured: dict[Case, list[Measured]] = {case: [] for case in cases}
    with ExitStack() as stack:
        share = LocalShare.load(source, dtype, "cpu")
        swarm = stack.enter_context(LocalSwarm(options.model, spans, server_flags=flags))
        bench = Bench(swarm, share, stack)
        bench.measure(cases[0])  # warms up
        for number in range(options.rounds):
            for case in cases:
                measured[case].append(bench.measure(case))
            console.print(f"round {number + 1} of {options.rounds}", style="dim")
    return measured


def show(measured: dict[Case, list[Measured]]) -> bool:
    """Print the table; returns whether every token was right and the target is met."""
    table = Table(
        *("prefix", "stage", "kill to token", "dies", "noticed", "recovery"),
        *("dials", "opens", "replays", "step"),
        *("new session", "stage's compute", "ratio", "tokens again", "KB moved", "KB lost"),
    )
    good = True
    for case, runs in measured.items():
        ratio = median(each.ratio for each in runs)
        last = runs[-1]
        good &= all(each.same and each.replayed_bytes <= each.lost_bytes for each in runs)
        good &= ratio <= FACTOR
        table.add_row(
            *(str(case.prefix), STAGES[case.stage]),
            *(ms(runs, name) for name in ("total_s", "dying_s", "detection_s")),
            *(ms(runs, name) for name in ("recovery_s", "staffing_s", "opening_s")),
            *(ms(runs, name) for name in ("replaying_s", "step_s")),
            *(ms(runs, name) for name in ("restart_s", "compute_s")),
            f"{ratio:.2f}",
            *(str(last.replayed_tokens), f"{last.replayed_bytes / 1024:.0f}"),
            f"{last.lost_bytes / 1024:.0f}",
        )
    console.print(table)
    wrong = sum(not each.same for runs in measured.values() for each in runs)
    console.print(
        "times in ms, medians; ratio = recovery / stage's compute, target "
        f"{FACTOR}; runs with other tokens than undisturbed: {wrong}"
    )
    return good


def ms(runs: Sequence[Measured], name: str) -> str:
    """The median of one time, in milliseconds."""
    return f"{1000 * median(getattr(each, name) for each in runs):.0f}"


def draw(measured: dict[Case, list[Measured]], file: Path) -> None:
    """Stacked bars: what the wait for the next token is made of, beside a new session."""
    try:
        import matplotlib as mpl
    except ImportError:
        console.print("no picture: matplotlib is missing (scripts/setup-venv dev installs it)")
        return
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    names = [f"{STAGES[case.stage]}\n{case.prefix}" for case in measured]
    below = [0.0] * len(names)
    for name, label in (
        ("dying_s", "the process dies"),
        ("detection_s", "noticed"),
        ("recovery_s", "recovery"),
        ("step_s", "the step itself"),
    ):
        parts = [median(getattr(each, name) for each in runs) for runs in measured.values()]
        axes.bar([x - 0.2 for x in range(len(names))], parts, 0.38, bottom=below, label=label)
        below = [a + b for a, b in zip(below, parts, strict=True)]
    over = [median(each.restart_s for each in runs) for runs in measured.values()]
    axes.bar([x + 0.2 for x in range(len(names))], over, 0.38, color="0.7", label="new session")
    limits = [
        median(each.dying_s + each.detection_s + FACTOR * each.compute_s for each in runs)
        for runs in measured.values()
    ]
    axes.plot([x - 0.2 for x in range(len(names))], limits, "k_", markersize=24, label="target")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("stage killed, tokens of the prompt")
    axes.set_ylabel("seconds to the next token")
    axes.legend()
    figure.savefig(file, dpi=150)
    console.print(f"drawn: {file}")


def main() -> int:
    """Parse flags, measure, print; 1 when a token was wrong or the target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("recovery.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = run(options)
    good = show(measured)
    draw(measured, options.picture)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
