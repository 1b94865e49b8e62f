"""What a placement gives as it is, to compare a plan with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.planner.assembly import Assembler
from bloombee.planner.layouts import Layout, chains
from bloombee.planner.planning import shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.core import Span
    from bloombee.planner.layouts import Chain
    from bloombee.planner.plan import RoutePlan
    from bloombee.planner.planning import Problem


@dataclass(frozen=True, slots=True)
class Standing:
    """Routes that share no peer, each as it serves most."""

    routes: tuple[RoutePlan, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of all routes."""
        return sum(route.tokens_per_s for route in self.routes)


def standing(problem: Problem, spans: Sequence[Span]) -> Standing:
    """The best that servers of these spans, in the problem's order, can do as they are.

    Routes with most of the flow come first, and others that need none of their peers. Empty
    when the spans leave a gap, or have no room for the workload.
    """
    taken: set[int] = set()
    routes: list[RoutePlan] = []
    for chain in sorted(chains(problem, Layout(tuple(spans))), key=lambda each: -each.share):
        if taken & {peer for peer, _ in chain.steps}:
            continue
        best = best_route(problem, chain)
        if best is not None:
            taken |= {peer for peer, _ in chain.steps}
            routes.append(best)
    return Standing(tuple(routes))


def best_route(problem: Problem, chain: Chain) -> RoutePlan | None:
    """The chain with the batch and micro-batches that serve most; None when nothing fits."""
    assembler = Assembler(problem.model, problem.cluster, problem.workload)
    made = [
        assembler.route(shape, chain.steps) for shape in shapes(problem.workload, problem.objective)
    ]
    possible = [route for route in made if math.isfinite(route.token_s)]
    return max(possible, key=lambda route: route.tokens_per_s, default=None)
