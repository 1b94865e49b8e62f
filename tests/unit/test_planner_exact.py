"""The dynamic programmes find what trying everything finds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.planner.costs import Costs, Focus, price
from bloombee.planner.limits import caps, limit, lowest_cap
from bloombee.planner.order_dp import Found, front, plan_order
from bloombee.planner.planning import Problem, candidates, shapes
from bloombee.planner.set_search import search_sets, weights_of_sets
from bloombee.planner.workload import Goal, Head, Objective, Shape, Workload
from tests.planning import (
    LLAMA_30B,
    brute_force,
    every_order,
    random_cluster,
    random_costs,
    sub_orders,
)

if TYPE_CHECKING:
    from bloombee.planner.profiles import Floats

goals = st.sampled_from(Goal)
problems = st.builds(
    random_costs,
    st.integers(0, 2**32),
    peers=st.integers(1, 3),
    blocks=st.integers(1, 5),
    codecs=st.integers(1, 2),
    server_head=st.booleans(),
)
thousands = settings(max_examples=1500, deadline=None)
hundreds = settings(max_examples=200, deadline=None)


def _score(found: Found | None) -> float:
    return float("inf") if found is None else found.score_s


@thousands
@given(costs=problems, goal=goals, shuffle=st.randoms(use_true_random=False))
def test_given_order(costs: Costs, goal: Goal, shuffle: object) -> None:
    order = list(range(costs.peers))
    shuffle.shuffle(order)  # pyright: ignore[reportAttributeAccessIssue]  # hypothesis types it so
    expected = brute_force(costs, sub_orders(order), goal)
    assert _score(plan_order(costs, order, goal)) == pytest.approx(expected)


@thousands
@given(costs=problems, goal=goals)
def test_any_order(costs: Costs, goal: Goal) -> None:
    expected = brute_force(costs, every_order(costs.peers), goal)
    assert _score(search_sets(costs, goal)) == pytest.approx(expected)


@hundreds
@given(costs=problems, goal=goals)
def test_the_route_is_worth_its_score(costs: Costs, goal: Goal) -> None:
    found = search_sets(costs, goal)
    if found is None:
        return
    order = [peer for peer, _ in found.route]
    assert sum(blocks for _, blocks in found.route) == costs.blocks
    assert len(set(order)) == len(order)
    # Only these spans: every other length is forbidden.
    stage = np.full_like(costs.stage_s, np.inf)
    for peer, blocks in found.route:
        stage[:, peer, blocks] = costs.stage_s[:, peer, blocks]
    only = replace(costs, stage_s=stage)
    assert brute_force(only, iter([tuple(order)]), goal) == pytest.approx(found.score_s)


@hundreds
@given(costs=problems, seed=st.integers(0, 2**32), goal=goals)
def test_naming_the_peers_otherwise_changes_nothing(costs: Costs, seed: int, goal: Goal) -> None:
    new = np.random.default_rng(seed).permutation(costs.peers)
    groups = new if costs.enter_s.shape[1] > 1 else np.array([0])
    renamed = replace(
        costs,
        stage_s=costs.stage_s[:, new],
        hop_s=costs.hop_s[:, new[:, None], new],
        hop_busy_s=costs.hop_busy_s[:, new[:, None], new],
        enter_s=costs.enter_s[:, groups[:, None], new],
        enter_busy_s=costs.enter_busy_s[:, groups[:, None], new],
        leave_s=costs.leave_s[:, groups[:, None], new],
        leave_busy_s=costs.leave_busy_s[:, groups[:, None], new],
    )
    assert _score(search_sets(renamed, goal)) == _score(search_sets(costs, goal))


@hundreds
@given(costs=problems, goal=goals, factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_all_times_twice_as_long_take_twice_as_long(
    costs: Costs, goal: Goal, factor: float
) -> None:
    names = ("stage_s", "hop_s", "hop_busy_s", "enter_s", "enter_busy_s", "leave_s", "leave_busy_s")
    arrays: dict[str, Floats] = {name: getattr(costs, name) * factor for name in names}
    scaled = replace(costs, **arrays)
    before, after = search_sets(costs, goal), search_sets(scaled, goal)
    assert _score(after) == _score(before) * factor
    assert (before and before.route) == (after and after.route)


@hundreds
@given(costs=problems, goal=goals, seed=st.integers(0, 2**32))
def test_sets_can_cost_more_than_their_time(costs: Costs, goal: Goal, seed: int) -> None:
    """As tokens per dollar do, and a limit on peers."""
    prices = np.random.default_rng(seed).integers(1, 5, costs.peers).astype(np.float64)
    sums = weights_of_sets(prices)
    found = search_sets(costs, goal, sums)
    expected = min(
        brute_force(costs, iter([order]), goal) * prices[list(order)].sum()
        for order in every_order(costs.peers)
    )
    assert _score(found) == pytest.approx(expected)


@hundreds
@given(costs=problems)
def test_the_front_is_where_neither_can_be_bettered(costs: Costs) -> None:
    order = range(costs.peers)
    points = front(costs, order)
    assert all(
        left[0] > right[0] and left[1] < right[1]
        for left, right in zip(points, points[1:], strict=False)
    )
    expected = brute_force(costs, sub_orders(order), Goal.FILL)
    scores = [Goal.FILL.seconds(lat, cap, costs.micro_batches) for cap, lat in points]
    assert min(scores, default=float("inf")) == pytest.approx(expected)


@hundreds
@given(costs=problems)
def test_no_plan_goes_below_the_lowest_cap(costs: Costs) -> None:
    below = np.nextafter(lowest_cap(costs), -np.inf)
    limited = limit(costs, below)
    quickest = limited.stage_s.min(axis=0)
    reach = [max(np.flatnonzero(np.isfinite(line)), default=0) for line in quickest]
    assert sum(reach) < costs.blocks
    assert all(cap >= lowest_cap(costs) for cap in caps(costs))


@pytest.mark.parametrize("head", Head)
@pytest.mark.parametrize("seed", range(4))
def test_real_times_on_a_tight_cluster(seed: int, head: Head) -> None:
    """Memory, offloading, streaming and codecs included, against all orders and spans."""
    model = replace(LLAMA_30B, blocks=6)
    cluster = random_cluster(seed, 3, tight=True)
    costs = price(model, cluster, Workload(), Shape(8, 2, 128, head), Focus.DECODE).costs
    for goal in Goal:
        expected = brute_force(costs, every_order(3), goal)
        assert _score(search_sets(costs, goal)) == pytest.approx(expected)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_plan_is_the_best_of_all_shapes(seed: int, objective: Objective) -> None:
    """Batches, micro-batches, chunks and heads: bounds leave out nothing that could win."""
    model = replace(LLAMA_30B, blocks=5)
    cluster = random_cluster(seed, 3, tight=True)
    workload = Workload(batches=(1, 4), chunk_tokens=(64, 256))
    problem = Problem(model, cluster, workload, objective)
    weights = problem.weights()
    expected = float("inf")
    for shape in shapes(workload, objective):
        costs = price(model, cluster, workload, shape, problem.focus).costs
        for order in every_order(3):
            seconds = brute_force(costs, iter([order]), problem.goal) / problem.share(shape)
            used = 1.0 if weights is None else float(weights[list(order)].sum())
            expected = min(expected, seconds * used)
    found = candidates(problem)
    assert (found[0].score if found else float("inf")) == pytest.approx(expected)
