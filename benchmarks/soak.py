"""Clients that never stop asking, servers that keep dying: nothing may be wrong or lost.

Four servers whose spans overlap so that every block is held twice, eight clients. Every
20 seconds a server, chosen by the seed, is killed (-9) or told to stop, and started
again. Every answer is compared with what the swarm said before anything happened to
it. At the end: requests, wrong and lost ones, tokens/s, recoveries, pages that were
not freed, and memory and open files of every process at start and end. The exit code
is 1 when anything was wrong, lost or not freed.

    python benchmarks/soak.py [--minutes 20] [--seed 1] [--clients 8] [--every 20]
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.economy import Economy, add_flags, economy_line
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.client.auto import LocalShare
from bloombee.errors import BloomBeeError
from bloombee.models import open_source

SPANS = ("0:20", "10:30", "0:15", "15:30")
LENGTHS = (5, 20, 60, 150, 400)
NEW_TOKENS = (12, 24, 48)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "seed": 11},
    "beams": {"do_sample": False, "num_beams": 3},
    "batch": {"do_sample": False},
}
STOP_S = 45.0
SETTLE_S = 60.0
SAMPLE_S = 5.0
console = Console(width=140)


@dataclass(frozen=True)
class Question:
    """A prompt of random ids, and how to go on from it."""

    number: int
    kind: str
    columns: int
    new: int

    def ask(self, model: Any) -> list[list[int]]:
        """Generate; raises what `generate` raises."""
        rows = 3 if self.kind == "batch" else 1
        numbers = torch.Generator().manual_seed(self.number)
        ids = torch.randint(100, model.config.vocab_size, (rows, self.columns), generator=numbers)
        arguments = {**KINDS[self.kind], "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.new, **arguments
        )
        return out[:, self.columns :].tolist()


def questions() -> list[Question]:
    """One of each kind, length and number of new tokens, in turn: 30."""
    kinds = ["greedy", "greedy", "sampling", "greedy", "beams", "batch"]
    return [
        Question(n, kinds[n % len(kinds)], LENGTHS[n % len(LENGTHS)], NEW_TOKENS[n // 2 % 3])
        for n in range(30)
    ]


@dataclass
class Tally:
    """What the clients counted; every change under the lock."""

    requests: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """Asks questions until told to stop, and compares the answers."""

    def __init__(self, model: Any, expected: dict[Question, list[list[int]]], seed: int) -> None:
        self._model = model
        self._expected = expected
        self._random = random.Random(seed)

    def work(self, tally: Tally, stop: threading.Event) -> None:
        """Until `stop`; the question at hand is finished."""
        known = list(self._expected)
        while not stop.is_set():
            self._one(self._random.choice(known), tally)

    def _one(self, question: Question, tally: Tally) -> None:
        started = time.monotonic()
        before = self._model.traffic
        found: list[list[int]] | None = None
        problem = ""
        try:
            found = question.ask(self._model)
        except BloomBeeError as error:
            problem = f"{type(error).__name__}: {error}"
        traffic = self._model.traffic
        with tally.lock:
            tally.requests += 1
            tally.longest_s = max(tally.longest_s, time.monotonic() - started)
            if traffic is not before:  # it got as far as a session
                tally.recoveries += [each.seconds for each in traffic.recoveries]
            if found is None:
                tally.lost.append(f"{question}: {problem}")
                return
            tally.tokens += sum(len(row) for row in found)
            if found != self._expected[question]:
                tally.wrong.append(f"{question}: {found} instead of {self._expected[question]}")


@dataclass
class Use:
    """Memory and open files of one process, when first and last seen."""

    name: str
    first: tuple[float, int, int]
    last: tuple[float, int, int]
    since: float
    until: float


class Watch:
    """Looks at every process of the swarm and this one; new ones once they have settled."""

    def __init__(self) -> None:
        self.seen: dict[int, Use] = {}

    def look(self, swarm: LocalSwarm) -> None:
        """Note what every process uses now."""
        now = time.monotonic()
        named = [("clients", psutil.Process())]
        named += [(c.name, psutil.Process(c.process.pid)) for c in swarm.children if c.is_running]
        for name, process in named:
            try:
                family = [(name, process)]
                family += [(f"{name} {child.name()}", child) for child in daemons(name, process)]
                for label, each in family:
                    self._note(label, each, now)
            except psutil.NoSuchProcess:
                continue  # killed between two lines, by whoever looks

    def _note(self, name: str, process: psutil.Process, now: float) -> None:
        with process.oneshot():
            used = (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
        known = self.seen.get(process.pid)
        if known is None:
            self.seen[process.pid] = Use(name, used, used, now, now)
        else:
            known.last, known.until = used, now

    def show(self, least_s: float) -> None:
        """Print every process that was seen for `least_s` or longer."""
        table = Table("process", "seen for s", "RSS MiB", "open files", "threads")
        for use in self.seen.values():
            if use.until - use.since >= least_s:
                pairs = list(zip(use.first, use.last, strict=True))
                columns = [f"{first:.0f} -> {last:.0f}" for first, last in pairs]
                table.add_row(use.name, f"{use.until - use.since:.0f}", *columns)
        console.print(table)


def daemons(name: str, process: psutil.Process) -> list[psutil.Process]:
    """The libp2p daemons of a server; those of the clients are counted in one place only."""
    return [] if name == "clients" else process.children()


class Chaos:
    """Ends and restarts servers, one at a time, as the seed says."""

    def __init__(self, swarm: LocalSwarm, seed: int, every_s: float) -> None:
        self._swarm = swarm
        self._random = random.Random(seed)
        self._every_s = every_s
        self.done: list[str] = []

    def run(self, until: float, watch: Watch, tally: Tally) -> None:
        """Until that time. Call it in the main thread: servers end with who started them."""
        pause = threading.Event()
        due = time.monotonic() + self._every_s / 2
        while time.monotonic() < until:
            pause.wait(min(SAMPLE_S, max(0.1, due - time.monotonic())))
            watch.look(self._swarm)
            if time.monotonic() >= due:
                due = time.monotonic() + self._every_s
                self._strike(pause)
                with tally.lock:
                    counts = f"{tally.requests} requests, {len(tally.recoveries)} recoveries"
                    bad = f"{len(tally.wrong)} wrong, {len(tally.lost)} lost"
                console.print(f"{self.done[-1]}; {counts}, {bad}", style="dim")

    def _strike(self, pause: threading.Event) -> None:
        index = self._random.randrange(len(self._swarm.spans))
        how = self._random.choice(("killed", "killed", "told to stop"))
        away_s = self._random.uniform(0.0, self._every_s / 5)
        server = self._swarm.server(index)
        if how == "killed":
            server.kill()
        else:
            server.signal(signal.SIGTERM)
            server.finish(STOP_S)
        pause.wait(away_s)
        self._swarm.restart(index)
        self.done.append(f"{server.name} ({self._swarm.spans[index]}) {how}")


def run(options: argparse.Namespace) -> int:
    """Start, learn the answers, disturb, report; returns the exit code."""
    source = open_source(options.model)
    share = LocalShare.load(source, torch.float32, "cpu")
    flags = ("--dtype", "float32", "--threads", "1")
    tally, watch, stop = Tally(), Watch(), threading.Event()
    machine = Economy.of(options)
    with ExitStack() as stack:
        swarm = stack.enter_context(LocalSwarm(options.model, SPANS, server_flags=flags))
        models = [share.join(tuple(swarm.initial_peers)) for _ in range(options.clients)]
        for model in models:
            stack.callback(model.close)
        pool = stack.enter_context(ThreadPoolExecutor(options.clients))
        stack.callback(stop.set)
        expected = learn(models, pool)
        console.print(f"{len(expected)} questions answered undisturbed")
        clients = [Client(m, expected, options.seed * 1000 + n) for n, m in enumerate(models)]
        started = time.monotonic()
        working = [pool.submit(client.work, tally, stop) for client in clients]
        chaos = Chaos(swarm, options.seed, options.every)
        chaos.run(started + 60 * options.minutes, watch, tally)
        stop.set()
        for each in working:
            each.result()
        took_s = time.monotonic() - started
        held = leftover(swarm)
        watch.look(swarm)
    console.print(economy_line(tally.tokens / took_s, machine))
    return report(tally, chaos, watch, held, took_s)


def learn(models: list[Any], pool: ThreadPoolExecutor) -> dict[Question, list[list[int]]]:
    """The answers of the undisturbed swarm."""
    asked = {
        question: pool.submit(question.ask, models[number % len(models)])
        for number, question in enumerate(questions())
    }
    return {question: answer.result() for question, answer in asked.items()}


def leftover(swarm: LocalSwarm) -> int:
    """KV tokens that servers still hold, once they had time to let go."""
    until, pause = time.monotonic() + SETTLE_S, threading.Event()
    while True:
        held = sum(each.kv_tokens - each.free_tokens for each in swarm.describe())
        if not held or time.monotonic() > until:
            return held
        pause.wait(0.5)


def report(tally: Tally, chaos: Chaos, watch: Watch, held: int, took_s: float) -> int:
    """Print what happened; 1 when something was wrong, lost or not freed."""
    watch.show(least_s=min(60.0, took_s / 4))
    recoveries = f"{len(tally.recoveries)} recoveries"
    if tally.recoveries:
        recoveries += (
            f" (median {median(tally.recoveries):.2f} s, longest {max(tally.recoveries):.2f} s)"
        )
    console.print(
        f"{took_s / 60:.1f} minutes, {len(chaos.done)} servers ended and restarted: "
        f"{tally.requests} requests, {len(tally.wrong)} wrong, {len(tally.lost)} lost, "
        f"{tally.tokens / took_s:.1f} tokens/s, {recoveries}, longest request "
        f"{tally.longest_s:.1f} s, {held} KV tokens not freed"
    )
    for line in (*tally.wrong[:5], *tally.lost[:5]):
        console.print(line, style="red")
    return 1 if tally.wrong or tally.lost or held or not tally.requests else 0


def main() -> int:
    """Parse flags and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="decides who dies, when and how")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two deaths")
    add_flags(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
