"""What the next-best choices would give: one decision of the plan changed at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bloombee.planner.assembly import Assembler
from bloombee.planner.layouts import equal_split, greedy
from bloombee.planner.plan import Infeasible, Plan
from bloombee.planner.planning import Problem, combine, plan
from bloombee.planner.profiles import RAW
from bloombee.planner.workload import Head, Objective, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.planner.layouts import Layout

GREEDY_SEQUENCES = 32
"""Full sequences whose KV the greedy rule leaves room for, as its servers must choose blindly."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice, and the plan it leads to or why there is none."""

    change: str
    outcome: Plan | Infeasible


def alternatives(problem: Problem, chosen: Plan) -> list[Alternative]:
    """Plans that differ from the first route of `chosen` in one decision, best first."""
    changed = _changes(problem, chosen)
    tried = [Alternative(change, plan(other, thorough=1)) for change, other in changed]
    tried += _other_rules(problem, chosen)

    def merit(alternative: Alternative) -> float:
        made = alternative.outcome
        return value(problem.objective, made) if isinstance(made, Plan) else float("-inf")

    return sorted(tried, key=merit, reverse=True)


def value(objective: Objective, made: Plan) -> float:
    """How good a plan is by an objective; larger is better, and zero where unknown."""
    if objective is Objective.LATENCY:
        return 1 / made.routes[0].decode_latency_s
    if objective is Objective.FIRST_TOKEN:
        return 1 / made.first_token_s
    if objective is Objective.COST:
        return made.tokens_per_dollar or 0.0
    if objective is Objective.ENERGY:
        return made.tokens_per_joule or 0.0
    return made.tokens_per_s


def _changes(problem: Problem, chosen: Plan) -> Iterator[tuple[str, Problem]]:
    """Problems that forbid one choice of the plan."""
    route = chosen.routes[0]
    shape, workload = route.shape, problem.workload
    same = replace(problem, workload=replace(workload, batches=(shape.batch,)))
    other = Head.CLIENT if shape.head is Head.SERVER else Head.SERVER
    yield f"head at the {other.value}", _with(same, heads=(other,))
    if len(route.stages) > 1:
        fewer = len(route.stages) - 1
        yield f"at most {fewer} peer{'s' if fewer > 1 else ''}", replace(same, most_peers=fewer)
    if shape.micro_batches > 1:
        yield "no micro-batches", _with(same, micro_batches=(shape.batch,))
    if any(stage.kv_offload or stage.streamed_blocks for stage in route.stages):
        peers = tuple(
            replace(peer, host_bytes=0, streams_weights=False) for peer in problem.cluster.peers
        )
        yield "nothing offloaded", replace(same, cluster=replace(problem.cluster, peers=peers))
    if any(hop.codec != RAW.name for hop in route.hops):
        raw = replace(problem.cluster, codecs=(RAW,))
        yield "no compression", replace(same, cluster=raw)
    for batch in (shape.batch // 2, shape.batch * 2):
        if batch:
            yield f"batch {batch}", _with(same, batches=(batch,))


def _with(problem: Problem, **changes: object) -> Problem:
    return replace(problem, workload=replace(problem.workload, **changes))


def _other_rules(problem: Problem, chosen: Plan) -> list[Alternative]:
    """Equal spans over all peers, and Petals' greedy rule, with the plan's batch and head."""
    shape = chosen.routes[0].shape
    whole = shape.batch * problem.workload.full_tokens
    some = min(shape.batch, GREEDY_SEQUENCES) * problem.workload.full_tokens
    found = [
        _by_layout(problem, shape, "equal spans over all peers", equal_split(problem, whole)),
        _by_layout(problem, shape, "Petals' greedy rule", greedy(problem, some)),
    ]
    return [alternative for alternative in found if alternative is not None]


def _by_layout(
    problem: Problem, shape: Shape, change: str, layout: Layout | None
) -> Alternative | None:
    """The best way of cutting the plan's batch up for a layout's spans; None if none fits."""
    route = None if layout is None else _first_chain(layout, problem.model.blocks)
    if route is None or len(route) > (problem.most_peers or len(route)):
        return None
    assembler = Assembler(problem.model, problem.cluster, problem.workload)
    sizes = problem.workload.micro_batches_of(shape.batch)
    made = [assembler.route(replace(shape, micro_batch=size), route) for size in sizes]
    best = min(made, key=lambda plan: plan.token_s)
    if best.token_s == float("inf"):
        return None
    return Alternative(change, combine(problem, (best,), best.token_s / shape.batch))


def _first_chain(layout: Layout, blocks: int) -> tuple[tuple[int, int], ...] | None:
    """From block 0 on, always to whoever holds the next block and reaches furthest."""
    steps: list[tuple[int, int]] = []
    done = 0
    while done < blocks:
        able = [(span.end, -peer) for peer, span in layout.placed() if done in span]
        if not able:
            return None
        end, peer = max(able)
        steps.append((-peer, end - done))
        done = end
    return tuple(steps)
