"""What micro-batches without a barrier bring, over links of several speeds.

Three stages and a client in hosts of their own, joined by an emulated network. Devices
are paced (see `bloombee/server/pacing.py`), so that three stages can be busy at a time on
two cores. A link's rate follows from its ratio: raw bytes of one full-batch decode hop over
the rate, over the time that one stage needs alone for the full batch; 0 is no limit.
Schemes, all greedy:

- `client head, whole`: no micro-batches, logits at the client;
- `client head, M barrier`: the paper's micro-batches, which wait for each other every token;
- `server head, whole`: the loop closes at the last stage, no micro-batches;
- `server head, M groups`: ours.

Prints tokens/s (from when all rows decode), the ratio to the same head without
micro-batches in the same round, how busy each stage and link was, and the share of the
bound that was reached (how busy the busiest resource was); draws a timeline. Links carry
full speed until every row has its first token: what is measured is decoding.

    python -m benchmarks.pipeline [--ratios 0 0.17 0.6 1.1 6.5] [--rtt-ms 0] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.economy import Economy, add_flags, economy_line
from benchmarks.emulation.network import Emulation, Traffic
from benchmarks.pipelined.analysis import Link, Shown, Window, shown, steady, transfers
from benchmarks.pipelined.client import Answer, First, Job, Request
from benchmarks.pipelined.figure import Lanes, draw
from benchmarks.pipelined.process import ClientProcess
from benchmarks.worker import agreeing
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.config.networks import NetworkFile
from bloombee.server.pacing import Pass, read_diary

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 576
SERVERS = ("server-0", "server-1", "server-2")
QUEUE_MS, MTU = 2000.0, 1500
"""A full batch fits into the queue of the slowest link: what is measured isn't its losses."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
console = Console(width=190)


@dataclass(frozen=True)
class Scheme:
    """One way to decode a batch."""

    head: str
    groups: int

    def __str__(self) -> str:
        if self.groups == 1:
            return f"{self.head} head, whole"
        way = "barrier" if self.head == "client" else "groups"
        return f"{self.head} head, {self.groups} {way}"


@dataclass(frozen=True)
class Run:
    """One run, and what came of it."""

    scheme: Scheme
    answer: Answer
    figures: Shown
    lanes: Lanes
    window: Window
    cores: float
    bytes_per_token: tuple[float, ...]


class Bench:
    """The swarm in its network, and the client in it."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options = options
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._network = stack.enter_context(Emulation(_network(options.rtt_ms)))
        hosts = ("client", *SERVERS)
        places = [self._network.place(host) for host in hosts]
        flags = ("--dtype", options.dtype, "--threads", "1", "--pace", str(options.pace))
        self._swarm = stack.enter_context(
            LocalSwarm(
                options.model,
                options.spans,
                server_flags=(*flags, "--diary", str(self._folder)),
                places=places,
            )
        )
        job = Job(options.model, options.dtype, self._swarm.initial_peers)
        self._client = stack.enter_context(ClientProcess(job, places[0].prefix))
        self._solo_s = 0.0

    @property
    def hop_bytes(self) -> int:
        """Raw bytes of a full-batch decode hop."""
        return self.options.batch * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Raw bytes of one row."""
        return WIDTH * ITEM_BYTES[self.options.dtype]

    def warm_up(self, schemes: Sequence[Scheme]) -> None:
        """Run every scheme shortly; measure what a stage needs alone for the full batch."""
        for scheme in schemes:
            self._client.ask(self._request(scheme, 8))
        whole = [
            (p.ended_us - p.started_us) / 1e6
            for passes in self._passes()
            for p in passes
            if p.decode_tokens == self.options.batch
        ]
        self._solo_s = median(whole)  # of the stages, which are to be about equal
        console.print(
            f"a stage alone, batch {self.options.batch}: {self._solo_s * 1e3:.1f} ms "
            f"(paced {self.options.pace:g} x); hop {self.hop_bytes:,} bytes"
        )

    def rate_mbps(self, ratio: float) -> float | None:
        """The rate of links at a ratio."""
        return None if ratio == 0 else self.hop_bytes * 8 / (ratio * self._solo_s) / 1e6

    def run(self, scheme: Scheme, ratio: float, new_tokens: int) -> Run:
        """One batch over links of that ratio."""
        rate = self.rate_mbps(ratio)
        shaped: list[tuple[float, Traffic]] = []

        def shape(_: First) -> None:
            self._set_rates(rate)
            shaped.append((time.perf_counter(), self._network.traffic()))

        before = self._cpu_s()
        began = time.perf_counter()
        try:
            answer = self._client.ask(self._request(scheme, new_tokens), shape)
            (shaped_s, at_first), after = shaped[0], self._network.traffic()
        finally:
            self._set_rates(None)
        cores = (self._cpu_s() - before) / (time.perf_counter() - began)
        return self._made(scheme, answer, rate, shaped_s, after.since(at_first), cores)

    def _made(  # noqa: PLR0913 - all that a run is made of
        self,
        scheme: Scheme,
        answer: Answer,
        rate: float | None,
        shaped_s: float,
        moved: Traffic,
        cores: float,
    ) -> Run:
        stages = [[p for p in passes if p.decode_tokens] for passes in self._passes()]
        names = [*SERVERS, "client" if scheme.head == "client" else SERVERS[0]]
        sent = [moved.pairs[pair].bytes for pair in zip(names, names[1:], strict=False)]
        rows = [_rows_since(passes, shaped_s) for passes in stages]
        links = [
            Link(f"link {i}", None if rate is None else rate * 1e6, round(b / max(1, r)))
            for i, (b, r) in enumerate(zip(sent, rows, strict=True))
        ]
        figures = shown(answer, stages, links, shaped_s)
        lanes: dict[str, list[tuple[float, float]]] = {}
        for index, (passes, link) in enumerate(zip(stages, links, strict=True)):
            lanes[f"stage {index}"] = [(p.started_us / 1e6, p.ended_us / 1e6) for p in passes]
            lanes[link.name] = transfers(passes, link, shaped_s)
        window = steady(answer, shaped_s)
        per_token = tuple(float(link.row_bytes) for link in links)
        return Run(scheme, answer, figures, lanes, window, cores, per_token)

    def _set_rates(self, rate: float | None) -> None:
        for host in ("client", *SERVERS):
            self._network.set_rate(host, rate, None)

    def _request(self, scheme: Scheme, new_tokens: int) -> Request:
        options = self.options
        return Request(scheme.head, options.batch, scheme.groups, options.prompt, new_tokens)

    def _passes(self) -> list[list[Pass]]:
        spans = [span.replace(":", "-") for span in self._swarm.spans]
        return [read_diary(self._folder / f"{span}.jsonl") for span in spans]

    def _cpu_s(self) -> float:
        pids = [child.pid for child in self._swarm.servers] + [self._client.process.pid]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(each.user + each.system for each in times)


def _network(rtt_ms: float) -> NetworkFile:
    return NetworkFile.model_validate(
        {
            "hosts": [{"name": "client"}, {"name": "server", "count": len(SERVERS)}],
            "paths": [{"from": "*", "to": "*", "rtt_ms": rtt_ms}],
            "queue_ms": QUEUE_MS,
            "mtu": MTU,
        }
    )


def _rows_since(passes: Sequence[Pass], start_s: float) -> int:
    return sum(p.decode_tokens for p in passes if p.ended_us / 1e6 >= start_s)


def report(ratio: float, rate: float | None, rounds: list[list[Run]]) -> None:
    """One table: medians over the rounds."""
    speed = "unshaped" if rate is None else f"{rate:.2f} Mbit/s"
    table = Table(
        "scheme", "tokens/s", "x whole", "rows/pass", "of bound", "busiest", "busy %", "B/token",
        "cores", title=f"ratio {ratio:g} ({speed})",
    )  # fmt: skip
    for index, run in enumerate(rounds[0]):
        runs = [each[index] for each in rounds]
        bases = [next(r for r in each if _is_base(r.scheme, run.scheme)) for each in rounds]
        ratios = [
            r.figures.tokens_per_s / base.figures.tokens_per_s
            for r, base in zip(runs, bases, strict=True)
        ]
        busy = {name: median(r.figures.busy[name] for r in runs) for name in run.figures.busy}
        table.add_row(
            str(run.scheme),
            f"{median(r.figures.tokens_per_s for r in runs):.1f}",
            f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{median(r.figures.rows_per_pass for r in runs):.1f}",
            f"{100 * median(r.figures.of_bound for r in runs):.0f} %",
            run.figures.bottleneck,
            " ".join(f"{100 * share:.0f}" for share in busy.values()),
            " ".join(f"{each:.0f}" for each in run.bytes_per_token),
            f"{median(r.cores for r in runs):.2f}",
        )
    console.print(table)


def _is_base(base: Scheme, scheme: Scheme) -> bool:
    return base.head == scheme.head and base.groups == 1


def agreement(runs: Sequence[Run]) -> str:
    """How many tokens of all schemes equal those of the first, up to each first difference."""
    pairs = [agreeing(run.answer.ids, runs[0].answer.ids) for run in runs[1:]]
    same, total = (sum(each) for each in zip(*pairs, strict=True))
    return f"{same} of {total} tokens equal those of {runs[0].scheme}"


def main() -> int:
    """Run all environments and print."""
    options = _options()
    machine = Economy.of(options)
    schemes = [
        *(Scheme("client", groups) for groups in (1, *options.barrier)),
        *(Scheme("server", groups) for groups in (1, *options.groups)),
    ]
    with ExitStack() as stack:
        bench = Bench(options, stack)
        bench.warm_up(schemes)
        for ratio in options.ratios:
            new = options.new if ratio < 2 else max(12, options.new // 2)  # noqa: PLR2004 - slow
            rounds = [
                [bench.run(scheme, ratio, new) for scheme in schemes] for _ in range(options.rounds)
            ]
            report(ratio, bench.rate_mbps(ratio), rounds)
            console.print(agreement(rounds[0]))
            best = max(rounds[-1], key=lambda run: run.figures.tokens_per_s)
            line = economy_line(best.figures.tokens_per_s, machine)
            console.print(f"{best.scheme}, last round: {line}")
            if options.picture:
                file = options.picture.with_stem(f"{options.picture.stem}-{ratio:g}")
                drawn = {str(run.scheme): (run.lanes, run.window) for run in rounds[0]}
                draw(drawn, file, options.picture_s)
                console.print(f"drawn: {file}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0, 0.17, 0.6, 1.1, 6.5])
    parser.add_argument("--rtt-ms", type=float, default=0.0)
    parser.add_argument(
        "--spans", nargs=len(SERVERS), default=["0:12", "12:23", "23:30"],
        help="the head of SmolLM2 costs the last stage as much as four of its 30 blocks",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--groups", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--barrier", type=int, nargs="*", default=[4])
    parser.add_argument("--pace", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--picture-s", type=float, default=2.0)
    add_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
