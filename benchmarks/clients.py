"""Many clients at once, and one that sends a long prompt between them.

Three servers of one thread each, `--clients` sessions of one row with the server head, all
in one process (a peer of its own), and a second process that computes long prompts.

- total tokens/s of 1 and of all clients; target: at least 4 x;
- time between two tokens of a client, undisturbed, and while the other process has
  prompts of 2,000 tokens computed; target: the disturbed 99th percentile is at most
  2 x the undisturbed median plus one chunk.

    python -m benchmarks.clients [--clients 16] [--dtype float32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
import threading
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.economy import Economy, add_flags, economy_line
from benchmarks.pipelined.client import Answer, Job, Request
from benchmarks.pipelined.process import ClientProcess
from bloombee.cli.local_swarm import LocalSwarm, equal_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 30
SHARE = 4.0
"""How much more all clients get than one, at least."""
console = Console(width=120)


def rate(answer: Answer) -> float:
    """Tokens/s of all rows, those after each row's first, from the last first token on."""
    start_s = max(times[0] for times in answer.times_s)
    end_s = max(times[-1] for times in answer.times_s)
    return sum(at > start_s for times in answer.times_s for at in times) / (end_s - start_s)


def gaps_ms(answer: Answer) -> np.ndarray:
    """Milliseconds between neighbouring tokens of a row, all rows together."""
    return np.concatenate([np.diff(times) for times in answer.times_s]) * 1000


@contextmanager
def disturbing(other: ClientProcess, prompt_tokens: int) -> Iterator[list[float]]:
    """Prompts of `other` are computed for as long as the block runs; their times in seconds."""
    taken: list[float] = []
    over = threading.Event()

    def go_on() -> None:
        number = 0
        while not over.is_set():
            number += 1
            request = Request("server", 1, 1, prompt_tokens - number % 50, 1)
            taken.append(other.ask(request).first_after_s)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()


def main() -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    add_flags(parser)
    options = parser.parse_args()
    machine = Economy.of(options)
    flags = ("--dtype", options.dtype, "--threads", "1", "--chunk-tokens", str(options.chunk))
    with ExitStack() as stack:
        swarm = stack.enter_context(
            LocalSwarm(options.model, equal_spans(BLOCKS, 3), server_flags=flags)
        )
        job = Job(options.model, options.dtype, swarm.initial_peers)
        clients = stack.enter_context(ClientProcess(job))
        other = stack.enter_context(ClientProcess(job))
        one = Request("server", 1, 1, options.prompt, options.new)
        many = Request("server", options.clients, options.clients, options.prompt, options.new)
        for process, request in ((clients, many), (other, one)):
            process.ask(request)
        rounds = [_round(clients, other, one, many, options) for _ in range(options.rounds)]
    return _report(rounds, options, machine)


def _round(
    clients: ClientProcess,
    other: ClientProcess,
    one: Request,
    many: Request,
    options: argparse.Namespace,
) -> dict[str, float]:
    alone, together = clients.ask(one), clients.ask(many)
    chunk = other.ask(Request("server", 1, 1, options.chunk, 1))
    with disturbing(other, options.long) as prompts:
        disturbed = clients.ask(many)
    return {
        "one": rate(alone),
        "all": rate(together),
        "share": rate(together) / rate(alone),
        "median_ms": float(np.median(gaps_ms(together))),
        "p99_ms": float(np.percentile(gaps_ms(together), 99)),
        "disturbed_median_ms": float(np.median(gaps_ms(disturbed))),
        "disturbed_p99_ms": float(np.percentile(gaps_ms(disturbed), 99)),
        "chunk_ms": chunk.first_after_s * 1000,
        "prompts": float(len(prompts)),
    }


def _report(rounds: list[dict[str, float]], options: argparse.Namespace, machine: Economy) -> int:
    table = Table("figure", *(f"round {number}" for number in range(1, len(rounds) + 1)), "median")
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        table.add_row(name, *(f"{value:.1f}" for value in values), f"{median(values):.1f}")
    console.print(table)
    console.print(economy_line(median(each["all"] for each in rounds), machine))
    share = median(each["share"] for each in rounds)
    allowed = [2 * each["median_ms"] + each["chunk_ms"] for each in rounds]
    late = median(
        each["disturbed_p99_ms"] / bound for each, bound in zip(rounds, allowed, strict=True)
    )
    console.print(f"{options.clients} clients over one: {share:.2f} x (target {SHARE})")
    console.print(f"disturbed p99 over 2 x median + a chunk: {late:.2f} (target at most 1)")
    return 0 if share >= SHARE and late <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
