"""A plan for the servers of a running swarm, from what they measured of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bloombee.cli.model_facts import facts_of
from bloombee.cli.observing import ask_swarm
from bloombee.cli.plan import planned, problem_of
from bloombee.cli.plan_report import PlanReport, Today
from bloombee.errors import SettingsError
from bloombee.planner.observed import Observed, Seen, observe
from bloombee.planner.profiles import RAW
from bloombee.planner.standing import standing
from bloombee.planner.workload import Head

if TYPE_CHECKING:
    from bloombee.cli.observing import Heards
    from bloombee.config.plan import PlanSettings
    from bloombee.planner.planning import Problem

VALUE_BYTES = {"float32": 4}


def live(settings: PlanSettings) -> PlanReport:
    """Ask the swarm, and plan for who answered.

    Raises SettingsError when no plan can be made, SwarmError and ModelError as the commands do.
    """
    heards = ask_swarm(settings, settings.model)
    seen = [
        Seen(h.record.peer, h.record.span, h.description.costs, h.description.links, h.rtt_s)
        for h in heards.answers
    ]
    dtypes = {heard.record.dtype for heard in heards.answers}
    value_bytes = max((VALUE_BYTES.get(dtype, 2) for dtype in dtypes), default=2)
    model = facts_of(settings.model, value_bytes)
    observed = observe(seen, model, (RAW,))
    if not observed.servers:
        why = "; ".join((*observed.refused, *heards.silent)) or "none answered"
        raise SettingsError(f"no server to plan with: {why}")
    problem = problem_of(settings, model, observed.cluster, "the swarm")
    # Only servers have told what the head costs them.
    problem = replace(problem, workload=replace(problem.workload, heads=(Head.SERVER,)))
    report = planned(settings, problem, f"{len(observed.servers)} running servers")
    return replace(report, today=_today(report, problem, observed, heards))


def _today(report: PlanReport, problem: Problem, observed: Observed, heards: Heards) -> Today:
    batches = tuple({route.shape.batch for route in report.plan.routes})
    asked = sorted({*problem.workload.batches, *batches})
    widest = replace(problem, workload=replace(problem.workload, batches=tuple(asked)))
    now = standing(widest, [server.span for server in observed.servers])
    gain = report.plan.tokens_per_s / now.tokens_per_s if now.tokens_per_s else None
    wanted = {stage.peer: stage.span for route in report.plan.routes for stage in route.stages}
    moves = tuple(
        f"{server.peer}: {server.span} -> {wanted.get(server.peer, 'not needed')}"
        for server in observed.servers
        if wanted.get(server.peer) != server.span
    )
    count = len(observed.servers) + 1
    left_out = (*observed.refused, *heards.silent)
    links = count * (count - 1)
    return Today(now.tokens_per_s, gain, moves, len(observed.guessed), links, left_out)
