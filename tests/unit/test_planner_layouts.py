"""Other systems' placements: what they are, what flows through them, what they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.config.clusters import codecs, devices, model_sizes, read_cluster
from bloombee.config.files import config_path
from bloombee.core import Span
from bloombee.planner.clusters import Tables, build, model_facts
from bloombee.planner.contest import Contender, Entry, by_flow, by_plan, serve
from bloombee.planner.flow import max_flow
from bloombee.planner.layouts import (
    Layout,
    capacities,
    chains,
    equal_split,
    flow_of,
    greedy,
    most_flow,
)
from bloombee.planner.planning import Problem, candidates
from bloombee.planner.replicas import plan_replicas
from bloombee.planner.workload import Head, Workload
from tests.planning import LLAMA_30B, random_cluster

INFINITE = float("inf")


def test_flow_by_hand() -> None:
    """Two ways of 3 and 5 that share a link of 6."""
    edges = {(4, 0): INFINITE, (4, 1): INFINITE, (0, 2): 9.0, (1, 2): 9.0, (2, 3): 6.0}
    flow = max_flow([3.0, 5.0, 9.0, 9.0], {**edges, (3, 5): INFINITE})
    assert flow.value == pytest.approx(6.0)
    assert {path for path, _ in flow.paths} == {(0, 2, 3), (1, 2, 3)}


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(1, 5))
def test_no_cut_is_smaller_than_the_flow(data: st.DataObject, count: int) -> None:
    through = data.draw(st.lists(st.integers(0, 5).map(float), min_size=count, max_size=count))
    pairs = [(i, j) for i in range(count + 1) for j in [*range(count), count + 1] if i != j]
    pairs = [(count if i == count else i, j) for i, j in pairs if (i, j) != (count, count + 1)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))
    edges = {pair: float(data.draw(st.integers(0, 5))) for pair in chosen}
    flow = max_flow(through, edges)
    least = min(_cut(through, edges, side, count) for side in range(1 << count))
    assert flow.value == pytest.approx(least)


def _cut(through: list[float], edges: dict[tuple[int, int], float], side: int, count: int) -> float:
    """The least cut with these nodes' exits on the source's side; entrances as suits best."""
    total = 0.0
    for node in range(count):
        if side >> node & 1:
            continue
        into = sum(c for (i, j), c in edges.items() if j == node and _is_near(i, side, count))
        total += min(into, through[node])
    for (i, j), capacity in edges.items():
        if j == count + 1 and _is_near(i, side, count):
            total += capacity
    return total


def _is_near(node: int, side: int, count: int) -> bool:
    return node == count or bool(side >> node & 1)


def test_layouts_hold_what_fits() -> None:
    problem = Problem(LLAMA_30B, random_cluster(0, 6), Workload())
    room = capacities(problem, 8192)
    even = equal_split(problem, 8192)
    assert even is not None
    counts = [len(span) if span else 0 for span in even.spans]
    assert sum(counts) == LLAMA_30B.blocks
    assert all(count <= most for count, most in zip(counts, room, strict=True))
    free = [count for count, most in zip(counts, room, strict=True) if count < most]
    assert not free or max(counts) - min(free) <= 1
    filled = greedy(problem, 8192)
    assert [len(span) if span else 0 for span in filled.spans] == room
    assert equal_split(replace(problem, model=replace(LLAMA_30B, blocks=900)), 8192) is None


def test_local_search_only_adds_flow() -> None:
    problem = Problem(LLAMA_30B, random_cluster(4, 6), Workload())
    before = max(
        flow_of(problem, layout).value
        for layout in (greedy(problem, 4096), equal_split(problem, 4096))
        if layout is not None
    )
    after = flow_of(problem, most_flow(problem, 4096, sweeps=1)).value
    assert after >= before


def test_chains_cover_the_model_and_share_all_the_work() -> None:
    problem = Problem(LLAMA_30B, random_cluster(1, 6), Workload())
    found = chains(problem, greedy(problem, 4096))
    assert sum(chain.share for chain in found) == pytest.approx(1.0)
    assert all(sum(n for _, n in chain.steps) == LLAMA_30B.blocks for chain in found)


def test_a_layout_without_room_for_kv_serves_nobody() -> None:
    cluster = random_cluster(0, 4)
    problem = Problem(LLAMA_30B, cluster, Workload())
    tight = tuple(
        replace(peer, device_bytes=15 * LLAMA_30B.block_bytes + 2 * peer.workspace_bytes)
        for peer in cluster.peers
    )
    full = replace(problem, cluster=replace(cluster, peers=tight))
    spans = tuple(Span(15 * i, 15 * i + 15) for i in range(4))
    assert serve(full, by_flow(full, Layout(spans)), Entry(sequences=512, rows=512)) is None


def test_on_clusters_of_helix_shape_the_plan_serves_more() -> None:
    """In the same simulator; the flow of the other layouts is larger, their KV isn't."""
    model = model_facts("llama-2-70b", model_sizes()["llama-2-70b"])
    file = read_cluster(config_path("clusters", "helix-regions.yaml"))
    whole = build(file, model, Tables(devices(), codecs()))
    # Nothing is offloaded here, so that memory is alike for all.
    cluster = replace(whole, peers=tuple(replace(peer, host_bytes=0) for peer in whole.peers))
    workload = Workload(
        prompt_tokens=512,
        new_tokens=32,
        batches=(128, 256),
        micro_batches=(8, 32),
        chunk_tokens=(512,),
        heads=(Head.SERVER,),
        count_prefill=True,
    )
    problem = Problem(model, cluster, workload)
    planned = by_plan(problem, plan_replicas(problem, candidates(problem, thorough=1)[0], 3))
    others = [by_flow(problem, fill(problem, 65536)) for fill in (greedy, _flow_once)]
    served = [_served(problem, contender) for contender in (planned, *others)]
    flows = [flow_of(problem, contender.layout).value for contender in (planned, *others)]
    assert served[0] > 1.3 * max(served[1:])
    assert max(flows[1:]) > 0.9 * flows[0]


def _flow_once(problem: Problem, kv_tokens: int) -> Layout:
    return most_flow(problem, kv_tokens, sweeps=1)


def _served(problem: Problem, contender: Contender) -> float:
    outcomes = [serve(problem, contender, Entry(sequences=512, rows=rows)) for rows in (8, 32)]
    return max((o.tokens / o.end_s for o in outcomes if o is not None), default=0.0)
