"""Tokens/s of a local swarm of three servers beside transformers' own `generate`.

One torch thread a server and client; transformers once with one thread and once
with two. Every model has its own process, all stay loaded, and runs are
interleaved: local, swarm with the head at the client and at the last server (what
`generate` does by itself), local with two threads, then again. Prints medians and ratios
within the run; greedy ids of all runs are compared.

    python -m benchmarks.decode [--batch 1 8 32] [--dtype float32 bfloat16] [--rounds 5]
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.economy import Economy, add_flags, economy_line
from benchmarks.process import LineProcess
from benchmarks.worker import Answer, Job, Request, Traffic, agreeing
from bloombee.cli.local_swarm import LocalSwarm, equal_spans

BLOCKS = 30
SWARM = "swarm"
HEADS = ("client", "server")
console = Console(width=140)


class Worker(LineProcess):
    """A model in a process of its own (see `benchmarks/worker.py`)."""

    def __init__(self, job: Job) -> None:
        super().__init__("benchmarks.worker", job)

    def ask(self, request: Request) -> Answer:
        """Run one request and wait for its answer."""
        self.write(request)
        return self.read(Answer)


def measure(dtype: str, options: argparse.Namespace, machine: Economy) -> None:
    """One dtype: start the swarm and the workers, run all batches, print the tables."""
    flags = ("--dtype", dtype, "--threads", "1")
    with ExitStack() as stack:
        swarm = stack.enter_context(
            LocalSwarm(options.model, equal_spans(BLOCKS, options.servers), server_flags=flags)
        )
        starts = ", ".join(f"{server.start_s:.1f}" for server in swarm.servers)
        console.print(f"\n[bold]{dtype}[/]: servers ready after {starts} s")
        workers = {
            name: stack.enter_context(Worker(job))
            for name, job in {
                "local 1 thread": Job(options.model, dtype, 1),
                SWARM: Job(options.model, dtype, 1, swarm.initial_peers),
                "local 2 threads": Job(options.model, dtype, 2),
            }.items()
        }
        tracer = stack.enter_context(
            Worker(Job(options.model, dtype, 1, swarm.initial_peers, trace=True))
        )
        answers: dict[str, list[Answer]] = {}
        table = Table("batch", "model", "tokens/s", "x local 1 thread", "first token s", "ms/step")
        for batch in options.batch:
            request = Request(batch, options.prompt, options.new)
            answers = interleave(workers, request, options.rounds)
            add_rows(table, batch, answers)
            traced = tracer.ask(request)
            if traced.traffic is not None:
                print_cost(batch, options.new, traced.traffic)
        console.print(table)
        best = median(run.decode_tokens_per_s for run in answers["swarm"])
        console.print(f"swarm, batch {options.batch[-1]}: {economy_line(best, machine)}")
        rss = [psutil.Process(s.pid).memory_info().rss / 2**20 for s in swarm.servers]
        client = psutil.Process(workers[SWARM].process.pid).memory_info().rss / 2**20
        console.print(f"RSS MiB: servers {', '.join(f'{x:.0f}' for x in rss)}; client {client:.0f}")


def interleave(
    workers: dict[str, Worker], request: Request, rounds: int
) -> dict[str, list[Answer]]:
    """One warm-up each, then `rounds` answers of every worker and head, taken in turn."""
    asked = [
        (f"{name}, {head} head" if name == SWARM else name, worker, head)
        for name, worker in workers.items()
        for head in (HEADS if name == SWARM else HEADS[:1])
    ]
    for _, worker, head in asked:
        worker.ask(msgspec.structs.replace(request, new_tokens=8, head=head))
    answers: dict[str, list[Answer]] = {name: [] for name, _, _ in asked}
    for _ in range(rounds):
        for name, worker, head in asked:
            answers[name].append(worker.ask(msgspec.structs.replace(request, head=head)))
    return answers


def add_rows(table: Table, batch: int, answers: dict[str, list[Answer]]) -> None:
    """Median rate, median of the paired ratios, first token, and step time."""
    base = answers["local 1 thread"]
    for name, runs in answers.items():
        ratios = [
            run.decode_tokens_per_s / ref.decode_tokens_per_s
            for run, ref in zip(runs, base, strict=True)
        ]
        table.add_row(
            str(batch),
            name,
            f"{median(r.decode_tokens_per_s for r in runs):.1f}",
            f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{median(r.first_token_s for r in runs):.3f}",
            f"{1000 * median(s for r in runs for s in r.step_s):.2f}",
        )
    for head in HEADS:
        agree = matching(base[0], answers[f"{SWARM}, {head} head"][0])
        console.print(f"batch {batch}, {head} head: {agree} greedy tokens equal to local")


def matching(a: Answer, b: Answer) -> str:
    """How many tokens agree before each row's first difference."""
    same, total = agreeing(a.ids, b.ids)
    return f"{same} of {total}"


def print_cost(batch: int, steps: int, moved: Traffic) -> None:
    """Bytes per token and our own time per hop, from one traced run."""
    tokens = batch * steps
    ours = (moved.round_trip_us - moved.compute_us) / (moved.stages + 1)
    console.print(
        f"batch {batch}: client sends {moved.bytes_sent / tokens:.0f} and receives "
        f"{moved.bytes_received / tokens:.0f} bytes a token, prompt included; a step takes "
        f"{moved.round_trip_us:.0f} us, computing {moved.compute_us:.0f}, inside servers "
        f"{moved.in_servers_us:.0f}: [bold]{ours:.0f} us of our own a hop[/]"
    )


def main() -> None:
    """Parse flags and measure each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_flags(parser)
    options = parser.parse_args()
    machine = Economy.of(options)
    for dtype in options.dtype:
        measure(dtype, options, machine)


if __name__ == "__main__":
    main()
