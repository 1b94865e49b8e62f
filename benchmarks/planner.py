"""The planner by itself: how long it thinks, the paper's shapes, and other placements.

Everything here is computed from the cost model and the event simulator, with block times
from a roofline over published device figures: ratios inside one run, no measurement of a swarm.

1. Speed: one batch size of the given-order programme (8 peers, 80 blocks; target 1 ms), the
   exact order search, and the heuristic for 64 and 1,000 peers.
2. The paper's shapes: two GPUs with offloaded KV against three per dollar (8.3), batch 128
   with offloading against 32, micro-batches by environment (8.4).
3. Clusters of Helix's shape: planned routes against equal split, Petals' greedy rule and a
   max-flow placement, each served to the end of one backlog in the same simulator; nothing
   is offloaded there. Max-flow is a local search of seconds, not Helix's solver.

    python benchmarks/planner.py [speed] [paper] [contest]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from bloombee.config.clusters import codecs, devices, model_sizes, read_cluster
from bloombee.config.files import config_path
from bloombee.core import PeerId
from bloombee.planner.assembly import Assembler
from bloombee.planner.clusters import Tables, build, model_facts
from bloombee.planner.contest import Contender, Entry, by_flow, by_plan, serve
from bloombee.planner.costs import Focus, price
from bloombee.planner.layouts import equal_split, flow_of, greedy, most_flow
from bloombee.planner.order_dp import plan_order
from bloombee.planner.order_search import Terms, search_order
from bloombee.planner.plan import Plan
from bloombee.planner.planning import Problem, candidates, plan
from bloombee.planner.profiles import (
    RAW,
    Cluster,
    Codec,
    ModelFacts,
    Network,
    PeerProfile,
    TimeTable,
)
from bloombee.planner.replicas import plan_replicas
from bloombee.planner.set_search import MOST_PEERS
from bloombee.planner.workload import Goal, Head, Objective, Shape, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from bloombee.planner.order_dp import Found

console = Console(width=140)
SECTIONS = ("speed", "paper", "contest")
KV_TOKENS = (16384, 65536, 131072, 262144)
"""KV that the other rules leave room for beside each block; the best counts."""
BATCH_32 = Workload(batches=(32,), micro_batches=(32,))
SPLIT = Codec("split", 0.68, 2.4e9, 4.3e9)
SERVED = Workload(
    prompt_tokens=512,
    new_tokens=64,
    batches=(64, 128, 256, 512, 1024),
    chunk_tokens=(512,),
    heads=(Head.SERVER,),
    count_prefill=True,
)


def facts(name: str) -> ModelFacts:
    """A model of the table."""
    return model_facts(name, model_sizes()[name])


def cluster_of(name: str, model: ModelFacts) -> Cluster:
    """A cluster that comes along."""
    file = read_cluster(config_path("clusters", f"{name}.yaml"))
    return build(file, model, Tables(devices(), codecs()))


# Speed


def random_cluster(peers: int) -> Cluster:
    """Machines of 16 to 48 GB, 0.5 to 3 ms a block, on 20 to 480 Mbit/s and 5 to 50 ms."""
    rng = np.random.default_rng(0)
    made: list[PeerProfile] = []
    for index in range(peers):
        block_s = float(rng.uniform(0.5e-3, 3e-3))
        table = TimeTable(
            (1, 64), (0, 4096), ((block_s, 1.5 * block_s), (2 * block_s, 4 * block_s))
        )
        made.append(
            PeerProfile(
                peer=PeerId(f"peer-{index}"),
                device_bytes=int(rng.uniform(16e9, 48e9)),
                decode=table,
                prefill=table.scaled(5.0),
                pass_s=1e-3,
                workspace_bytes=10**9,
                host_bytes=64 * 10**9,
                host_device_bytes_per_s=2e10,
            )
        )
    shape = (peers + 1, peers + 1)
    network = Network(rng.uniform(5e-3, 5e-2, shape), rng.uniform(2.5e6, 6e7, shape))
    return Cluster(tuple(made), network, (RAW, SPLIT))


def cpu_ms(work: Callable[[], Found | None], repeats: int) -> float:
    """Median milliseconds of processor time, so that a busy machine doesn't count."""
    times: list[float] = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append((time.process_time() - begin) * 1e3)
    return median(times)


def speed() -> None:
    """Milliseconds of the parts, by objective and head."""
    table = Table("peers x blocks", "head", "goal", "given order ms", "order search ms", "how")
    for peers, blocks in ((8, 80), (10, 80), (64, 128), (1000, 128)):
        model, cluster = replace(facts("llama-2-70b"), blocks=blocks), random_cluster(peers)
        small = peers <= MOST_PEERS
        for head in Head:
            shape = Shape(32, 8, 512, head)
            costs = price(model, cluster, Workload(), shape, Focus.DECODE).costs
            # Of many peers only one is tried as the first, as the search does.
            few = costs if small else costs.narrowed(np.arange(1))
            for goal in (Goal.SUM, Goal.RING, Goal.FILL):
                given = cpu_ms(partial(plan_order, few, range(peers), goal), 21 if small else 1)
                search = cpu_ms(partial(search_order, costs, Terms(goal)), 3 if small else 1)
                how = "exact" if small else "heuristic"
                table.add_row(
                    f"{peers} x {blocks}", head, goal, f"{given:.2f}", f"{search:,.0f}", how
                )
    console.print("Speed: processor time of one batch size, cost tables given", style="bold")
    console.print(table)


# The paper's shapes


def planned(problem: Problem) -> Plan:
    """The plan, which exists."""
    found = plan(problem)
    if not isinstance(found, Plan):
        raise SystemExit(found.reason)
    return found


def without_host(cluster: Cluster) -> Cluster:
    """The same machines with no memory to offload to."""
    return replace(cluster, peers=tuple(replace(p, host_bytes=0) for p in cluster.peers))


def paper() -> None:
    """Ratios beside the paper's."""
    offload = {"e1": 1.02, "e2": 1.05, "e3": 1.17, "e4": 1.18, "e5": 1.82}
    halves = {"e3": 1.053, "e4": 1.179, "e5": 1.395}
    table = Table(
        "environment", "2 GPUs offloaded / 3, per $", "paper", "micro-batch 16 / 32", "paper"
    )
    model = facts("llama-30b")
    for name, said in offload.items():
        cluster = cluster_of(name, model)
        # Its server waits for offloaded KV; compression was off.
        waiting = tuple(replace(p, overlaps=False, streams_weights=False) for p in cluster.peers)
        cluster = replace(cluster, peers=waiting, codecs=(RAW,))
        two = planned(Problem(model, cluster, BATCH_32, Objective.COST, most_peers=2))
        three = planned(Problem(model, without_host(cluster), BATCH_32, Objective.COST))
        per_dollar = (two.tokens_per_dollar or 0) / (three.tokens_per_dollar or 1)
        small = Workload(batches=(32,), micro_batches=(16,))
        whole = planned(Problem(model, without_host(cluster), BATCH_32)).tokens_per_s
        split = planned(Problem(model, without_host(cluster), small)).tokens_per_s
        paper_halves = f"{halves[name]:.2f}" if name in halves else "off"
        table.add_row(
            name, f"{per_dollar:.2f}", f"{said:.2f}", f"{split / whole:.2f}", paper_halves
        )
    console.print("LLaMA-30B on RTX 5090, batch 32, sequence 128", style="bold")
    console.print(table)
    assembler = Assembler(model, cluster_of("offload-e5", model), Workload())
    thirds = ((0, 20), (1, 20), (2, 20))
    sizes = [(batch, micro) for batch in (32, 128) for micro in (16, 32)]
    routes = [assembler.route(Shape(b, m, 128, Head.CLIENT), thirds) for b, m in sizes]
    small, large = (max(r.tokens_per_s for r in routes if r.shape.batch == b) for b in (32, 128))
    away = routes[-1].stages[0].kv_offload
    console.print(
        f"e5, three GPUs: batch 128 with {away:.0%} of its KV on the host gives "
        f"{large / small:.2f} x batch 32 (paper: 30 %, 1.14 x)\n"
    )


# Against other placements


@dataclass(frozen=True)
class Result:
    """What one placement does with the backlog."""

    flow: float
    tokens_per_s: float
    sequences: float


def result(problem: Problem, contender: Contender) -> Result:
    """The best of three job sizes."""
    best = Result(flow_of(problem, contender.layout).value, 0.0, 0.0)
    for rows in (4, 16, 64):
        outcome = serve(problem, contender, Entry(sequences=1024, rows=rows))
        if outcome is not None and outcome.tokens / outcome.end_s > best.tokens_per_s:
            at_once = outcome.mean_jobs * rows
            best = replace(best, tokens_per_s=outcome.tokens / outcome.end_s, sequences=at_once)
    return best


def contest() -> None:
    """Planned against the others on three clusters; KV room of the others as suits them best."""
    model = facts("llama-2-70b")
    for name in ("helix-single", "helix-regions", "helix-42"):
        problem = Problem(model, without_host(cluster_of(name, model)), SERVED)
        begin = time.perf_counter()
        made = plan_replicas(problem, candidates(problem)[0])
        took = time.perf_counter() - begin
        results = {
            f"planned ({len(made.routes)} routes, {took:.0f} s)": result(
                problem, by_plan(problem, made)
            )
        }
        for title, fill in (
            ("equal split", equal_split),
            ("Petals' greedy rule", greedy),
            ("max-flow", most_flow),
        ):
            layouts = [fill(problem, kv_tokens) for kv_tokens in KV_TOKENS]
            found = [result(problem, by_flow(problem, each)) for each in layouts if each]
            results[title] = max(found, key=lambda r: r.tokens_per_s)
        report(name, problem, results)


def report(name: str, problem: Problem, results: dict[str, Result]) -> None:
    """One table; prices and watts are those of all machines, whoever uses how many."""
    peers = range(len(problem.cluster.peers))
    dollars = sum(problem.cluster.dollars_per_s(peer) for peer in peers)
    watts = sum(peer.watts for peer in problem.cluster.peers)
    table = Table("placement", "max-flow", "served tokens/s", "planned /", "sequences at once")
    table.add_column("tokens/$")
    table.add_column("tokens/J")
    first = next(iter(results.values())).tokens_per_s
    for title, found in results.items():
        rate = found.tokens_per_s
        table.add_row(
            title,
            f"{found.flow:,.0f}",
            f"{rate:,.0f}",
            f"{first / rate:.2f}" if rate else "-",
            f"{found.sequences:.0f}",
            f"{rate / dollars:,.0f}",
            f"{rate / watts:.3f}",
        )
    console.print(f"{name}: LLaMA-2-70B, prompts of 512 and 64 new tokens", style="bold")
    console.print(table)


def main(argv: list[str]) -> None:
    """Run the sections named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("section", nargs="*", metavar="|".join(SECTIONS), help="all, if none")
    asked: list[str] = parser.parse_args(argv).section
    if wrong := set(asked).difference(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(wrong))}: choose of {', '.join(SECTIONS)}")
    for section in asked or SECTIONS:
        {"speed": speed, "paper": paper, "contest": contest}[section]()
    console.print("Power: declared watts of the devices; no hosts, no network.", style="dim")


if __name__ == "__main__":
    main(sys.argv[1:])
