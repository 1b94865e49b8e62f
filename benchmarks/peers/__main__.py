"""Ours beside other systems of the kind: same model, dtype, spans, network and prompts.

Each system has three servers and a client in hosts of their own in one emulated network (real
TCP, cubic on every route); all are up, one works at a time, and they take turns in every round.
Processes compute with one thread each, unpaced, on whatever cores there are. Prints tokens/s
of decoding after the first token, the ratio to the first other system in the same round, the
time until all rows have a first token, KB on the wire (all links of the system together,
headers included) for each new token, processor time, and memory of the servers.

    python -m benchmarks.peers [--install] [--quick] [--mbps 0 20] [--rtt-ms 0] [--rounds 3]

A system that can't run here is left out, in one line that says why. `--install` makes the
environment of Petals (PyPI's release, or `--petals-checkout`), under `--environments`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.emulation.network import Emulation, missing
from benchmarks.peers.folder import save
from benchmarks.peers.interface import Running, Site, System, Workload
from benchmarks.peers.ours import Ours
from benchmarks.peers.petals import Petals
from benchmarks.peers.petals_env import PetalsEnvironment
from benchmarks.pipelined.analysis import steady, tokens_in
from benchmarks.shaped.analysis import paired
from benchmarks.worker import agreeing
from bloombee.cli.local_swarm import equal_spans
from bloombee.config.networks import NetworkFile
from bloombee.errors import BloomBeeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psutil

    from benchmarks.pipelined.client import Answer

BLOCKS = 30
QUEUE_MS, MTU = 2000.0, 1500
WORKLOADS = {
    "single": Workload(1, 32, 64),
    "batch-8": Workload(8, 128, 32),
    "batch-32": Workload(32, 128, 32),
}
ENVIRONMENTS = Path.home() / ".cache" / "bloombee" / "peers"
console = Console(width=140)


@dataclass(frozen=True)
class Network:
    """Rate of every link (0: no limit) and round trip between any two hosts."""

    mbps: float
    rtt_ms: float

    def __str__(self) -> str:
        rate = f"{self.mbps:g} Mbit/s" if self.mbps else "no limit"
        return f"{rate}, RTT {self.rtt_ms:g} ms"


@dataclass(frozen=True)
class Run:
    """What came of one workload of one system."""

    system: str
    answer: Answer
    wire_bytes: int
    cpu_s: float
    memory_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Of decoding, after the first token."""
        window = steady(self.answer, 0.0)
        return tokens_in(self.answer, window) / window.length_s

    @property
    def first_s(self) -> float:
        """From the call until every row has a token."""
        return max(times[0] for times in self.answer.times_s) - self.answer.began_s

    @property
    def tokens(self) -> int:
        """All that were made."""
        return sum(map(len, self.answer.times_s))


class Bench:
    """All systems in one network."""

    def __init__(self, systems: Sequence[System], options: argparse.Namespace, stack: ExitStack):
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        model = options.environments / f"smollm2-{options.dtype}"
        save(model, options.dtype)
        spans = tuple(equal_spans(BLOCKS, options.servers))
        self._hosts = {
            system.name: [f"{index}-client", *(f"{index}-{i}" for i in range(len(spans)))]
            for index, system in enumerate(systems)
        }
        hosts = [{"name": host} for group in self._hosts.values() for host in group]
        file = NetworkFile.model_validate({"hosts": hosts, "queue_ms": QUEUE_MS, "mtu": MTU})
        self._network = stack.enter_context(Emulation(file))
        self._running: dict[str, Running] = {}
        for system in systems:
            console.print(f"starting {system.name}")
            places = tuple(self._network.place(host) for host in self._hosts[system.name])
            site = Site(places, spans, model, options.dtype, logs)
            self._running[system.name] = system.start(site, stack, lambda _: None)

    def warm_up(self, workload: Workload) -> None:
        """One run of each that is not measured."""
        for running in self._running.values():
            running.run(workload)

    def shape(self, network: Network) -> None:
        """All links of all systems from now on."""
        for hosts in self._hosts.values():
            for index, one in enumerate(hosts):
                for other in hosts[index + 1 :]:
                    self._network.set_path_rate(one, other, network.mbps or None)
                    self._network.set_delay(one, other, network.rtt_ms / 2)

    def run(self, system: str, workload: Workload) -> Run:
        """One workload of one system."""
        running, hosts = self._running[system], set(self._hosts[system])
        before, cpu_s = self._network.traffic(), _cpu_s(running)
        answer = running.run(workload)
        moved, spent_s = self._network.traffic().since(before), _cpu_s(running) - cpu_s
        wire = sum(count.bytes for ends, count in moved.pairs.items() if hosts >= set(ends))
        memory = sum(each.memory_info().rss for each in running.processes())
        return Run(system, answer, wire, spent_s, memory)


def _cpu_s(running: Running) -> float:
    times = [each.cpu_times() for top in running.processes() for each in _family(top)]
    return sum(each.user + each.system for each in times)


def _family(top: psutil.Process) -> list[psutil.Process]:
    return [top, *top.children(recursive=True)]


def report(network: Network, workload: Workload, rounds: list[list[Run]]) -> None:
    """One table: medians over rounds; ratios are ours over the other's."""
    table = Table(
        "system", "tokens/s", "x the last", "first token, s", "KB/token on the wire",
        "servers' CPU, s", "servers' memory, GB", title=f"{workload}; {network}",
        title_justify="left",
    )  # fmt: skip
    base = [row[-1].tokens_per_s for row in rounds]
    for index, run in enumerate(rounds[0]):
        runs = [row[index] for row in rounds]
        table.add_row(
            run.system,
            f"{median(r.tokens_per_s for r in runs):.1f}",
            str(paired([r.tokens_per_s for r in runs], base)),
            f"{median(r.first_s for r in runs):.2f}",
            f"{median(r.wire_bytes / r.tokens for r in runs) / 1e3:.1f}",
            f"{median(r.cpu_s for r in runs):.1f}",
            f"{median(r.memory_bytes for r in runs) / 1e9:.1f}",
        )
    console.print(table)
    for run in rounds[0][1:]:
        same, total = agreeing(run.answer.ids, rounds[0][0].answer.ids)
        first = rounds[0][0].system
        console.print(f"{run.system}: {same} of {total} tokens equal those of {first}")


def main() -> int:
    """Start what can run, compare, print."""
    options = _options()
    if reason := missing():
        console.print(f"left out: {reason}")
        return 0
    environment = PetalsEnvironment(options.environments / "petals", options.petals_checkout)
    if options.install and not environment.python.exists():
        try:
            environment.install(console.print)
        except BloomBeeError as error:
            console.print(str(error), markup=False)
    wanted: list[System] = [Ours("BloomBee"), Petals(environment)]
    systems = list[System]()
    for system in wanted:
        if reason := system.obstacle():
            console.print(f"{system.name} is left out: {reason}")
        else:
            systems.append(system)
    told = list[object]()
    with ExitStack() as stack:
        bench = Bench(systems, options, stack)
        bench.warm_up(Workload(2, 16, 4))
        for mbps in options.mbps:
            for rtt_ms in options.rtt_ms:
                network = Network(mbps, rtt_ms)
                bench.shape(network)
                for name in options.workloads:
                    workload = WORKLOADS[name]
                    rounds = [
                        [bench.run(system.name, workload) for system in systems]
                        for _ in range(options.rounds)
                    ]
                    report(network, workload, rounds)
                    told.append(_told(network, workload, rounds))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told)))
    return 0


def _told(network: Network, workload: Workload, rounds: list[list[Run]]) -> dict[str, object]:
    runs = [
        {
            "round": number,
            "system": run.system,
            "tokens_per_s": run.tokens_per_s,
            "first_s": run.first_s,
            "wire_bytes": run.wire_bytes,
            "cpu_s": run.cpu_s,
            "memory_bytes": run.memory_bytes,
        }
        for number, row in enumerate(rounds)
        for run in row
    ]
    return {"network": network, "workload": workload, "runs": runs}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--install", action="store_true", help="make what is missing")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="folder")
    parser.add_argument("--petals-checkout", type=Path, help="instead of PyPI's release")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--mbps", type=float, nargs="+", default=[0.0, 20.0], help="0: no limit")
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--workloads", nargs="+", choices=sorted(WORKLOADS), help="all, unless --quick"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, no batch of 32")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    if options.workloads is None:
        options.workloads = [name for name in WORKLOADS if not (options.quick and "32" in name)]
    return options


if __name__ == "__main__":
    sys.exit(main())
