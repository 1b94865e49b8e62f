"""Plans run in virtual time: the event simulator's answer ranks them, not flow alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.planner.jobs import Course, Job, Outcome, Station, Wire
from bloombee.planner.planning import PER_BATCH, finish
from bloombee.planner.simulator import Simulation
from bloombee.planner.workload import Head, Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.planner.plan import HopPlan, Plan, RoutePlan, StagePlan
    from bloombee.planner.planning import Candidate, Problem
    from bloombee.planner.workload import Workload

ROUNDS = 3
"""Jobs for each place in the pipeline, so that most of the time it is full."""
MOST_TOKENS = 48
"""New tokens simulated per sequence at most: the steady state shows long before."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How much of the work to play: prompts or only decoding, seconds kept for a picture."""

    prompts: bool = False
    traced_s: float = 0.0
    rounds: int = ROUNDS


def rehearse(route: RoutePlan, workload: Workload, options: Rehearsal | None = None) -> Outcome:
    """Run a route with as many micro-batches as its planned batch has, job after job."""
    options = options or Rehearsal()
    shape, prompts = route.shape, options.prompts
    new_tokens = workload.new_tokens if prompts else min(MOST_TOKENS, workload.new_tokens)
    prompt_tokens = workload.prompt_tokens if prompts else 0
    kv_tokens = shape.micro_batch * shape.micro_batches * (prompt_tokens + new_tokens)
    stations = [_station(stage, kv_tokens) for stage in route.stages]
    course = Course(
        tuple(range(len(stations))),
        tuple(len(stage.span) for stage in route.stages),
        entry=0,
        wires=tuple(range(1, 1 + len(stations))),
        answer_s=route.hops[-1].prefill_s,
    )
    job = Job(0, shape.micro_batch, prompt_tokens, new_tokens, shape.chunk_tokens)
    jobs = [job] * (shape.micro_batches * options.rounds)
    simulation = Simulation(stations, _wires(route), [course], traced_s=options.traced_s)
    return simulation.run(jobs)


def served_tokens_per_s(plan: Plan, workload: Workload, options: Rehearsal | None = None) -> float:
    """What all routes of a plan serve in steady state; they share nothing, so it adds up."""
    return sum(rehearse(route, workload, options).tokens_per_s for route in plan.routes)


def rank(problem: Problem, found: Sequence[Candidate], most: int = 6) -> list[Plan]:
    """Plans of the best candidates, best first by what the simulator says of each.

    Objectives of a single pass (latency, first token) have nothing to queue for: their
    candidates keep their order.
    """
    plans = [finish(problem, candidate) for candidate in found[:most]]
    if problem.objective not in PER_BATCH:
        return plans
    options = Rehearsal(prompts=problem.workload.count_prefill)
    scores = [
        _price(plan, problem.objective) / served_tokens_per_s(plan, problem.workload, options)
        for plan in plans
    ]
    # Close calls keep the cost model's order, which is exact where the simulation is a sample.
    order = sorted(range(len(plans)), key=lambda i: (round(math.log(max(scores[i], 1e-300)), 3), i))
    return [plans[i] for i in order]


def _price(plan: Plan, objective: Objective) -> float:
    """What a second of the plan costs, in what the objective saves."""
    if objective is Objective.COST:
        return plan.dollars_per_s
    return plan.watts if objective is Objective.ENERGY else 1.0


def _station(stage: StagePlan, kv_tokens: int) -> Station:
    """A stage that takes as long for a pass as planned, with KV for the planned batch."""

    def seconds(_blocks: int, _decode_rows: int, prefill_rows: int) -> float:
        return stage.prefill_s if prefill_rows else stage.decode_s

    return Station(str(stage.peer), seconds, kv_tokens * len(stage.span))


def _wires(route: RoutePlan) -> list[Wire]:
    """The entry, the way from the last stage to the first, and the hops between stages."""
    hops = route.hops
    entry = _wire(hops[0], f"{hops[0].target} <- prompts")
    if route.shape.head is Head.SERVER:
        closing = _wire(hops[-1], f"{hops[-1].source} -> {hops[-1].target}")
    else:
        out, back = hops[0], hops[-1]
        closing = Wire(
            f"{back.source} -> client -> {out.target}",
            lambda _decode, _prefill: max(out.decode_busy_s, back.decode_busy_s),
            lambda _decode, _prefill: out.decode_s + back.decode_s,
        )
    between = [_wire(hop, f"{hop.source} -> {hop.target}") for hop in hops[1:-1]]
    return [entry, closing, *between]


def _wire(hop: HopPlan, name: str) -> Wire:
    """A link that takes as long for a prompt chunk, or for a token, as the plan says."""

    def busy(_decode_rows: int, prefill_rows: int) -> float:
        return hop.prefill_busy_s if prefill_rows else hop.decode_busy_s

    def latency(_decode_rows: int, prefill_rows: int) -> float:
        return hop.prefill_s if prefill_rows else hop.decode_s

    return Wire(name, busy, latency)
