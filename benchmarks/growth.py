"""Nothing grows: open files, threads, shared memory and RSS of every process of a swarm.

Three servers and one client: sessions of greedy decoding, one after the other. Every
process (with the libp2p daemons) is looked at after a warm-up, in the middle and at the
end. The exit code is 1 when one holds more files, threads or shared memory at the end
than at the start, or more resident memory than the allowance.

    python benchmarks/growth.py [--sessions 200] [--steps 10000] [--model smollm2]
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bloombee import AutoDistributedModelForCausalLM
from bloombee.cli.local_swarm import LocalSwarm, equal_spans

SERVERS = 3
PROMPT = 8
WARM_UP = 10
SETTLING_S = 8.0
"""Ended streams linger for five seconds."""
ALLOWED_MIB = 24.0
ALLOWED_SHARE = 0.05
GO_THREADS = 6
"""A libp2p daemon's runtime starts threads as it needs them, and keeps them."""
SHARED = "/dev/shm"
console = Console(width=140)


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    files: int
    threads: int
    shared: int
    resident_mib: float

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        """Count; `shared` are mappings and open files in /dev/shm."""
        with process.oneshot():
            mapped = sum(1 for area in process.memory_maps() if area.path.startswith(SHARED))
            return cls(
                files=process.num_fds(),
                threads=process.num_threads(),
                shared=mapped,
                resident_mib=process.memory_info().rss / 2**20,
            )

    def grown_from(self, start: Held, *, daemon: bool) -> list[str]:
        """What there is more of than at the start, beyond what is allowed."""
        allowed = start.resident_mib + max(ALLOWED_MIB, ALLOWED_SHARE * start.resident_mib)
        more = {
            "files": self.files > start.files,
            "threads": self.threads > start.threads + (GO_THREADS if daemon else 0),
            "shared memory": self.shared > start.shared,
            "resident memory": self.resident_mib > allowed,
        }
        return [name for name, is_more in more.items() if is_more]


@dataclass(frozen=True)
class Look:
    """All processes at one moment; `listing` is how many files /dev/shm has."""

    held: dict[str, Held]
    listing: int


def processes(swarm: LocalSwarm) -> dict[str, psutil.Process]:
    """The processes of the swarm and this one, with their libp2p daemons, by name."""
    named = {"client": psutil.Process()}
    for child in swarm.children:
        named[child.name] = psutil.Process(child.process.pid)
    daemons: dict[str, psutil.Process] = {}
    for name, process in named.items():
        for child in process.children():
            if child.name() == "p2pd":
                daemons[f"{name}'s p2pd"] = child
    # The swarm's own children are children of the client as well, and have names of their own.
    return named | daemons


def look(named: dict[str, psutil.Process]) -> Look:
    """Wait until what has ended is gone, then count."""
    threading.Event().wait(SETTLING_S)
    return Look({name: Held.by(process) for name, process in named.items()}, listed())


def listed() -> int:
    """How many files lie in /dev/shm, of whomever."""
    return len(os.listdir(SHARED)) if os.path.isdir(SHARED) else 0


def decode(model: Any, number: int, steps: int) -> None:
    """One session of `steps` steps."""
    numbers = torch.Generator().manual_seed(number)
    ids = torch.randint(100, model.config.vocab_size, (1, PROMPT), generator=numbers)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        pad_token_id=0,
    )
    if out.shape[1] != PROMPT + steps:
        raise RuntimeError(f"{out.shape[1] - PROMPT} tokens instead of {steps}")


def run(options: argparse.Namespace) -> list[Look]:
    """All sessions; what was seen at start, middle and end."""
    flags = ("--dtype", "float32", "--threads", "1")
    with LocalSwarm(
        options.model, equal_spans(options.blocks, SERVERS), server_flags=flags
    ) as swarm:
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(
            options.model, initial_peers=swarm.initial_peers, dtype="float32"
        )
        each = max(1, options.steps // options.sessions)
        for number in range(WARM_UP):
            decode(model, number, each)
        named = processes(swarm)
        looks = [look(named)]
        started_s = time.monotonic()
        for half in (options.sessions // 2, options.sessions - options.sessions // 2):
            for number in range(half):
                decode(model, number, each)
            looks.append(look(named))
        spent_s = time.monotonic() - started_s
        console.print(f"{options.sessions} sessions of {each} steps in {spent_s:.0f} s")
        model.close()
    return looks


def report(looks: list[Look]) -> bool:
    """Print every process; returns whether one has grown."""
    table = Table("process", "files", "threads", "shared", "RSS MiB", "grown")
    any_grown = False
    for name in looks[0].held:
        helds = [each.held[name] for each in looks]
        grown = helds[-1].grown_from(helds[0], daemon="p2pd" in name)
        any_grown = any_grown or bool(grown)
        table.add_row(
            name,
            " ".join(str(held.files) for held in helds),
            " ".join(str(held.threads) for held in helds),
            " ".join(str(held.shared) for held in helds),
            " ".join(f"{held.resident_mib:.1f}" for held in helds),
            ", ".join(grown) or "no",
        )
    console.print(table)
    console.print(f"files in {SHARED}: {' '.join(str(each.listing) for each in looks)}")
    return any_grown


def main() -> int:
    """Parse flags, run, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return int(report(run(options)))


if __name__ == "__main__":
    sys.exit(main())
