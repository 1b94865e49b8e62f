"""The planner's front door: over batches, micro-batches, heads and chunks to the best plan.

Every shape (one way of cutting the work up) is searched with the best score so far as its
bound, most promising first. To ten peers each search is exact; beyond, all shapes are
searched quickly, each from the routes of the ones before it, and the best few thoroughly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.assembly import Assembler
from bloombee.planner.costs import Focus, price
from bloombee.planner.explanation import explain
from bloombee.planner.order_search import Terms, search_order
from bloombee.planner.plan import Infeasible, Plan, RoutePlan
from bloombee.planner.set_search import MOST_PEERS
from bloombee.planner.workload import Goal, Objective, Shape, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.planner.order_dp import Found
    from bloombee.planner.profiles import Cluster, Floats, ModelFacts

THOROUGH_SHAPES = 3
MOST_SEQUENCES = 4096
"""Batches are doubled up to here when none is asked for."""
PER_BATCH = {Objective.THROUGHPUT, Objective.COST, Objective.ENERGY}
"""Objectives that share a step's seconds among the sequences of the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What to plan: `most_peers` limits the length of a route."""

    model: ModelFacts
    cluster: Cluster
    workload: Workload = Workload()
    objective: Objective = Objective.THROUGHPUT
    most_peers: int | None = None

    @property
    def focus(self) -> Focus:
        """The phase that the objective is about."""
        return Focus.PREFILL if self.objective is Objective.FIRST_TOKEN else Focus.DECODE

    @property
    def goal(self) -> Goal:
        """How times make up the seconds of a step, by objective."""
        goals = {Objective.LATENCY: Goal.SUM, Objective.FIRST_TOKEN: Goal.FILL}
        return goals.get(self.objective, Goal.RING)

    def weights(self) -> Floats | None:
        """What each used peer multiplies the seconds by: dollars a second, watts, or nothing."""
        peers = range(len(self.cluster.peers))
        if self.objective is Objective.COST:
            return np.array([self.cluster.dollars_per_s(peer) for peer in peers])
        if self.objective is Objective.ENERGY:
            return np.array([self.cluster.peers[peer].watts for peer in peers])
        return None

    def share(self, shape: Shape) -> int:
        """How many sequences share a step's score."""
        return shape.batch if self.objective in PER_BATCH else 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape and the best route found for it; `score` is what the objective minimises."""

    score: float
    shape: Shape
    found: Found


def shapes(workload: Workload, objective: Objective) -> Iterator[Shape]:
    """Every way of cutting the work up that the objective cares for, largest batch first."""
    for batch in sorted(set(workload.batches), reverse=True):
        whole = objective in (Objective.LATENCY, Objective.FIRST_TOKEN)
        micro_batches = (batch,) if whole else workload.micro_batches_of(batch)
        chunks = _chunks(workload, batch) if objective is Objective.FIRST_TOKEN else ()
        for micro_batch in micro_batches:
            for chunk in chunks or (_usual_chunk(workload, batch),):
                for head in workload.heads:
                    yield Shape(batch, micro_batch, chunk, head)


def _chunks(workload: Workload, batch: int) -> tuple[int, ...]:
    """Candidates for tokens in one pass of prefill, none longer than all prompts together."""
    whole = batch * workload.prompt_tokens
    return tuple(sorted({min(chunk, whole) for chunk in workload.chunk_tokens}))


def _usual_chunk(workload: Workload, batch: int) -> int:
    """The chunk that routes are searched with: the shortest needs least workspace.

    Where prompts count in throughput it is one that doesn't spend most of a pass on
    reading weights.
    """
    chunks = _chunks(workload, batch)
    return chunks[len(chunks) // 2] if workload.count_prefill else chunks[0]


def candidates(problem: Problem, thorough: int = THOROUGH_SHAPES) -> list[Candidate]:
    """The best route of every shape that has one, best first.

    Beyond ten peers only the best `thorough` shapes are searched thoroughly.

    A shape whose route can't beat the best of another is left out, except in thorough
    searches of few peers, where the bound of its batch and head applies.
    """
    if not problem.cluster.peers:
        return []
    found = _search(problem, list(shapes(problem.workload, problem.objective)))
    if len(problem.cluster.peers) <= MOST_PEERS:
        return found
    best = [candidate.shape for candidate in found[:thorough]]
    deep = _search(problem, best, seeds=[_order(c.found) for c in found[:1]], thorough=True)
    named = {candidate.shape: candidate for candidate in (*found, *deep)}
    return sorted(named.values(), key=lambda candidate: candidate.score)


def widened(problem: Problem) -> list[Candidate]:
    """`candidates`, with the batch doubled for as long as the largest one is the best."""
    found = candidates(problem)
    largest = max(problem.workload.batches)
    while found and found[0].shape.batch == largest and largest < MOST_SEQUENCES:
        if problem.objective not in PER_BATCH:
            break
        largest *= 2
        workload = replace(problem.workload, batches=(largest,))
        more = candidates(replace(problem, workload=workload))
        found = sorted((*found, *more), key=lambda candidate: candidate.score)
    return found


def _search(
    problem: Problem,
    todo: list[Shape],
    *,
    seeds: list[tuple[int, ...]] | None = None,
    thorough: bool = False,
) -> list[Candidate]:
    terms = Terms(problem.goal, problem.weights(), problem.most_peers, thorough)
    bests: dict[tuple[int, str], float] = {}
    made: list[Candidate] = []
    best, warm = float("inf"), list(seeds or [])
    for shape in todo:
        share = problem.share(shape)
        bound = bests.get((shape.batch, shape.head), float("inf"))
        priced = price(problem.model, problem.cluster, problem.workload, shape, problem.focus)
        found = search_order(priced.costs, terms, bound * share, seeds=warm)
        if found is None:
            continue
        score = found.score_s / share
        bests[shape.batch, shape.head] = score
        made.append(Candidate(score, shape, found))
        # The best route so far and the last one are where the next search starts from.
        kept = [] if score < best else warm[:1]
        warm = list(dict.fromkeys((*kept, _order(found))))
        best = min(best, score)
    return sorted(made, key=lambda candidate: candidate.score)


def _order(found: Found) -> tuple[int, ...]:
    return tuple(peer for peer, _ in found.route)


def plan(problem: Problem, thorough: int = THOROUGH_SHAPES) -> Plan | Infeasible:
    """The best plan of one route, by the cost model, or why there is none."""
    found = candidates(problem, thorough)
    return finish(problem, found[0]) if found else explain(problem)


def finish(problem: Problem, candidate: Candidate) -> Plan:
    """The record of a candidate, with the prefill chunk that serves it best.

    That is the one of most tokens/s where prompts count in them, else of the soonest first
    token among those that leave decoding as it is: a longer chunk needs more workspace, and
    may push KV off the device.
    """
    assembler = Assembler(problem.model, problem.cluster, problem.workload)
    planned, workload = candidate.shape, problem.workload
    chunks = dict.fromkeys((planned.chunk_tokens, *_chunks(workload, planned.batch)))
    routes = [
        assembler.route(
            replace(planned, chunk_tokens=chunk), candidate.found.route, candidate.found.cap_s
        )
        for chunk in chunks
    ]
    if workload.count_prefill and problem.objective in PER_BATCH:
        best = max(routes, key=lambda route: tokens_per_s(workload, route))
    else:
        slowest = routes[0].token_s * (1 + 1e-9)
        best = min((r for r in routes if r.token_s <= slowest), key=lambda r: r.first_token_s)
    return combine(problem, (best,), candidate.score)


def combine(problem: Problem, routes: tuple[RoutePlan, ...], score: float) -> Plan:
    """A plan of these routes, with what they give and cost together."""
    cluster = problem.cluster
    used = [stage.index for route in routes for stage in route.stages]
    peers = [cluster.peers[index] for index in used]
    priced = all(peer.price_per_hour or peer.purchase for peer in peers)
    rated = all(peer.watts for peer in peers)
    return Plan(
        routes,
        score,
        sum(tokens_per_s(problem.workload, route) for route in routes),
        max(route.first_token_s for route in routes),
        sum(cluster.dollars_per_s(index) for index in used) if priced else 0.0,
        sum(peer.watts for peer in peers) if rated else 0.0,
    )


def tokens_per_s(workload: Workload, route: RoutePlan) -> float:
    """New tokens a second: of decoding, or of whole jobs where the workload counts prefill."""
    if not workload.count_prefill:
        return route.tokens_per_s
    # In steady service the busiest resource does both; alone, prefill comes before decode.
    passes = route.shape.chunks(workload, route.shape.micro_batch) / workload.new_tokens
    pairs = [(s.decode_s, s.prefill_s) for s in route.stages]
    pairs += [(hop.decode_busy_s, hop.prefill_busy_s) for hop in route.hops]
    busiest = max(decode + chunk * passes for decode, chunk in pairs)
    latency = route.decode_latency_s + route.prefill_latency_s * passes
    return route.shape.batch / max(latency, busiest * route.shape.micro_batches)
