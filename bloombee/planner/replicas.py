"""Several routes side by side: peers dealt out so that together they serve most.

A long route has more KV for a batch (its weights are held once) but a longer way round;
several short ones go round sooner. Which wins depends on the links, so a few ways of dealing
are planned and compared: one route and then further ones from the peers it left over, and
two or more groups at once, dealt by speed or by closeness. Heuristic: every route by itself
is planned as well as `planning` can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.costs import Focus, price
from bloombee.planner.order_dp import Found
from bloombee.planner.planning import Candidate, Problem, candidates, combine, finish
from bloombee.planner.workload import Objective, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bloombee.planner.plan import Plan
    from bloombee.planner.profiles import Floats

    Group = tuple[int, ...]

MOST_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class Replica:
    """A group of peers, by index in the whole cluster, and the best route among them."""

    group: Group
    candidate: Candidate

    @property
    def rate(self) -> float:
        """Sequences' tokens a second, as the objective counts them."""
        return 1 / self.candidate.score


def plan_replicas(problem: Problem, single: Candidate, most: int | None = None) -> Plan:
    """The best set of disjoint routes found, `single` (the best route alone) among them.

    More routes never give a token more cheaply or sooner than the best one does, so only
    throughput has more than one.
    """
    fitting = _most_replicas(problem) if most is None else most
    alone = _spread_out(problem, single)
    if problem.objective is not Objective.THROUGHPUT or fitting < 2:
        return _plan(problem, [alone])
    choices = [_grown(problem, [alone], fitting)]
    near = _nearby(problem, single)
    for count in range(2, fitting + 1):
        for groups in _deals(problem, count):
            dealt = [_best(near, group) for group in groups]
            if any(replica is None for replica in dealt):
                continue
            choices.append(_grown(near, [r for r in dealt if r is not None], fitting))
    best = max(choices, key=lambda chosen: sum(replica.rate for replica in chosen))
    return _plan(problem, best)


def _most_replicas(problem: Problem) -> int:
    held = sum(peer.device_bytes - peer.workspace_bytes for peer in problem.cluster.peers)
    copies = held // (problem.model.blocks * problem.model.block_bytes)
    return int(min(MOST_REPLICAS, copies, len(problem.cluster.peers)))


def _spread_out(problem: Problem, candidate: Candidate) -> Replica:
    return Replica(tuple(range(len(problem.cluster.peers))), candidate)


def _plan(problem: Problem, replicas: Sequence[Replica]) -> Plan:
    routes = tuple(
        finish(problem, _whole(replica)).routes[0]
        for replica in sorted(replicas, key=lambda r: -r.rate)
    )
    return combine(problem, routes, 1 / sum(replica.rate for replica in replicas))


def _whole(replica: Replica) -> Candidate:
    """The candidate with its peers named as in the whole cluster."""
    found = replica.candidate.found
    route = tuple((replica.group[peer], blocks) for peer, blocks in found.route)
    return replace(replica.candidate, found=Found(route, found.cap_s, found.score_s))


def _used(replica: Replica) -> set[int]:
    return {replica.group[peer] for peer, _ in replica.candidate.found.route}


def _grown(problem: Problem, replicas: list[Replica], most: int) -> list[Replica]:
    """Further routes from the peers that none uses, as long as there are any."""
    grown = list(replicas)
    while len(grown) < most:
        taken = set[int]().union(*(_used(replica) for replica in grown))
        rest = tuple(p for p in range(len(problem.cluster.peers)) if p not in taken)
        more = _best(problem, rest)
        if more is None:
            break
        grown.append(more)
    return grown


def _best(problem: Problem, group: Group) -> Replica | None:
    if not group:
        return None
    few = replace(problem, cluster=problem.cluster.take(group))
    found = candidates(few)
    return Replica(group, found[0]) if found else None


def _nearby(problem: Problem, single: Candidate) -> Problem:
    """The problem with fewer shapes: those around the best of one route."""
    shape = single.shape
    batches = {b for b in problem.workload.batches if b <= shape.batch}
    kept = sorted(batches, reverse=True)[:3]
    sizes = {max(1, shape.micro_batch // 2), shape.micro_batch, shape.micro_batch * 2}
    workload = replace(
        problem.workload,
        batches=tuple(kept),
        micro_batches=tuple(sorted(sizes)),
        heads=(shape.head,),
    )
    return replace(problem, workload=workload)


def _deals(problem: Problem, count: int) -> Iterator[list[Group]]:
    """Ways of dealing all peers to `count` groups: evenly by speed, and by closeness."""
    workload = problem.workload
    shape = Shape(1, 1, min(workload.chunk_tokens), workload.heads[0])
    costs = price(problem.model, problem.cluster, workload, shape, Focus.DECODE).costs
    with np.errstate(invalid="ignore"):
        per_block = costs.stage_s[0][:, 1:] / np.arange(1, costs.blocks + 1)
    ranked = [int(peer) for peer in np.argsort(per_block.min(axis=1), kind="stable")]
    even: list[list[int]] = [[] for _ in range(count)]
    for place, peer in enumerate(ranked):
        turn = place % (2 * count)
        even[min(turn, 2 * count - 1 - turn)].append(peer)
    yield [tuple(sorted(group)) for group in even]
    hops = costs.hop_s.min(axis=0)
    limit = -(-len(ranked) // count) + 1
    close: list[list[int]] = [[peer] for peer in _apart(ranked, hops, count)]
    for peer in ranked:
        if any(peer in group for group in close):
            continue
        open_groups = [group for group in close if len(group) < limit]
        min(open_groups, key=lambda group: float(hops[group[0], peer])).append(peer)
    yield [tuple(sorted(group)) for group in close]


def _apart(ranked: list[int], hops: Floats, count: int) -> list[int]:
    """Quick peers that are far from each other, to gather groups around."""
    seeds = [ranked[0]]
    while len(seeds) < count:
        rest = [peer for peer in ranked if peer not in seeds]
        seeds.append(max(rest, key=lambda peer: min(float(hops[seed, peer]) for seed in seeds)))
    return seeds
