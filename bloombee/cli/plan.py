"""`bloombee-plan`: which peers should hold which blocks, and what that gives."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bloombee.cli.serving import run_to_end
from bloombee.config.flags import parse
from bloombee.config.plan import PlanSettings
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.cli.plan_report import PlanReport
    from bloombee.config.clusters import ClusterFile
    from bloombee.planner.planning import Problem
    from bloombee.planner.profiles import Cluster, ModelFacts

PROG = "bloombee-plan"
WIDTH_IN_PIPES = 160


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    settings = parse(
        PlanSettings, argv, prog=PROG, description="Plan who serves what of a model on a cluster."
    )
    return run_to_end(PROG, lambda: show(settings))


def show(settings: PlanSettings) -> None:
    """Print the plan, as a table or JSON, and draw its timeline if asked.

    Raises SettingsError for a wrong cluster file or when there is no plan, ModelError for
    an unknown model.
    """
    from rich.console import Console

    with Console(stderr=True).status("planning"):
        report = make(settings)
    if settings.plot is not None:
        from bloombee.cli.plan_figure import draw

        draw(report, settings.plot)
    if settings.json_output:
        print(json.dumps(report.as_json(), indent=2))
        return
    from bloombee.cli.plan_report import render

    Console(width=None if sys.stdout.isatty() else WIDTH_IN_PIPES).print(render(report))


def make(settings: PlanSettings) -> PlanReport:
    """Plan as the settings ask. Raises as `show` does."""
    if settings.cluster is None:
        from bloombee.cli.plan_live import live

        return live(settings)
    file = _cluster_file(settings.cluster)
    about = file.about or settings.cluster
    return planned(settings, _problem(settings, file, settings.cluster), about)


def planned(settings: PlanSettings, problem: Problem, about: str) -> PlanReport:
    """The best plan of a problem, and what else there was. Raises SettingsError for none."""
    from bloombee.cli.plan_report import PlanReport
    from bloombee.planner.alternatives import alternatives
    from bloombee.planner.explanation import explain
    from bloombee.planner.planning import candidates, widened
    from bloombee.planner.rehearsal import Rehearsal, rank, served_tokens_per_s
    from bloombee.planner.replicas import plan_replicas

    found = candidates(problem) if settings.batch else widened(problem)
    if not found:
        reason = explain(problem).reason
        raise SettingsError(
            f"no plan for {settings.model} on {settings.cluster or about}: {reason}"
        )
    rehearsal = Rehearsal(prompts=settings.count_prefill)
    chosen = rank(problem, found)[0]
    served = served_tokens_per_s(chosen, problem.workload, rehearsal)
    if settings.replicas != 1:
        several = plan_replicas(problem, found[0], settings.replicas)
        together = served_tokens_per_s(several, problem.workload, rehearsal)
        if len(several.routes) > 1 and together > served:
            chosen, served = several, together
    return PlanReport(about, problem, chosen, served, tuple(alternatives(problem, chosen)))


def _cluster_file(cluster: str) -> ClusterFile:
    from bloombee.config.clusters import read_cluster
    from bloombee.config.files import config_path
    from bloombee.config.validation import nearest

    if Path(cluster).exists():
        return read_cluster(Path(cluster))
    known = {path.stem: path for path in config_path("clusters").glob("*.yaml")}
    name = cluster.removesuffix(".yaml")
    if name not in known:
        raise SettingsError(f"--cluster: no file {cluster!r}{nearest(name, known)}")
    return read_cluster(known[name])


def _problem(settings: PlanSettings, file: ClusterFile, name: str) -> Problem:
    from bloombee.cli.model_facts import facts_of
    from bloombee.config.clusters import codecs, devices
    from bloombee.planner.clusters import Tables, build

    model = facts_of(settings.model, settings.value_bytes)
    return problem_of(settings, model, build(file, model, Tables(devices(), codecs())), name)


def problem_of(settings: PlanSettings, model: ModelFacts, cluster: Cluster, name: str) -> Problem:
    """What the settings ask of that cluster.

    Raises SettingsError where a price or watts are needed and missing.
    """
    from bloombee.planner.planning import Problem
    from bloombee.planner.workload import Objective, Workload

    objective = Objective(settings.objective)
    if objective is Objective.COST:
        free = [p.peer for p in cluster.peers if not p.price_per_hour and not p.purchase]
        if free:
            raise SettingsError(
                f"{name}: {free[0]} has no price: give it price_per_hour or dollars"
            )
    if objective is Objective.ENERGY and (dark := [p.peer for p in cluster.peers if not p.watts]):
        raise SettingsError(f"{name}: {dark[0]} has no watts: give it watts")
    workload = Workload(
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        count_prefill=settings.count_prefill,
    )
    if settings.batch:
        workload = replace(workload, batches=settings.batch)
    return Problem(model, cluster, workload, objective, settings.max_peers)


if __name__ == "__main__":
    sys.exit(main())
