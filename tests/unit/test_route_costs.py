"""Routes by cost: equal to trying them all, spread within bounds, and careful with strangers."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import PeerId, Span
from bloombee.planner import routing
from bloombee.planner.hearsay import (
    NOTHING,
    Knowledge,
    LinkFacts,
    ServerFacts,
)
from bloombee.planner.profiles import TimeTable
from bloombee.planner.route_costs import Errand, costs_of
from bloombee.planner.routing import SPREAD, find_route, spread_factors, token_s
from bloombee.planner.workload import Objective
from tests.routes import Server, chosen, server, shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCKS = Span(0, 6)


# Trying them all --------------------------------------------------------------------------

_SPANS = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(
    lambda pair: Span(pair[0], min(pair[0] + pair[1], 6))
)
_TIMES = st.sampled_from([0.001, 0.004, 0.02])
_SERVERS = st.lists(
    st.tuples(_SPANS, _TIMES, _TIMES, st.sampled_from([None, 0.002, 0.06])), min_size=1, max_size=5
)


def _instance(drawn: Sequence[tuple[Span, float, float, float | None]], seed: int):
    servers = [Server(PeerId(f"p{i}"), each[0]) for i, each in enumerate(drawn)]
    facts = {
        s.peer: ServerFacts(
            decode=TimeTable.flat(block_s),
            prefill=TimeTable.flat(block_s),
            pass_s=pass_s,
            rtt_s=rtt_s,
        )
        for s, (_, block_s, pass_s, rtt_s) in zip(servers, drawn, strict=True)
    }
    luck = random.Random(seed)
    pairs = itertools.permutations([s.peer for s in servers], 2)
    ways = {
        pair: LinkFacts(luck.choice([0.001, 0.01, 0.1]), luck.choice([2e5, 1e7]))
        for pair in pairs
        if luck.random() < 0.8
    }
    return servers, Knowledge(facts, ways)


def _routes(servers: Sequence[Server], at: int, used: frozenset[int]) -> Iterator[list[tuple]]:
    if at == BLOCKS.end:
        yield []
        return
    for index, each in enumerate(servers):
        if index in used or at not in each.span:
            continue
        for end in range(at + 1, each.span.end + 1):
            for rest in _routes(servers, end, used | {index}):
                yield [(index, at, end), *rest]


def _scores(servers: Sequence[Server], errand: Errand, known: Knowledge) -> list[float]:
    """Of every route there is, term by term."""
    costs = costs_of(servers, BLOCKS, errand, known)
    scores = []
    for legs in _routes(servers, 0, frozenset()):
        stages = [costs.fixed_s[k] + costs.unit_s[k] * (end - start) for k, start, end in legs]
        queues = sum(costs.queue_s[k] for k, _, _ in legs)
        pairs = [(a[0], b[0]) for a, b in itertools.pairwise(legs)]
        first, last = legs[0][0], legs[-1][0]
        total = costs.enter_s[first] + costs.leave_s[last] + sum(stages) + queues
        total += sum(costs.hop_s[pair] for pair in pairs)
        if costs.ring_s is not None:
            total += costs.ring_s[last, first]
        if errand.objective is Objective.THROUGHPUT:
            busiest = max([*stages, *(costs.hop_busy_s[pair] for pair in pairs)])
            total += (errand.in_flight - 1) * busiest
        scores.append(float(total))
    return scores


@pytest.mark.parametrize("head", [True, False], ids=["server head", "client head"])
@given(drawn=_SERVERS, seed=st.integers(0, 99), new=st.sampled_from([1, 64]))
@settings(max_examples=150, deadline=None)
def test_the_quickest_route_is_that_of_trying_them_all(
    drawn: list[tuple[Span, float, float, float | None]], seed: int, new: int, head: bool
) -> None:
    servers, known = _instance(drawn, seed)
    errand = Errand(rows=2, prompt_tokens=8, new_tokens=new, server_head=head)
    _check(servers, errand, known, 1e-9)


@given(drawn=_SERVERS, seed=st.integers(0, 99), in_flight=st.sampled_from([2, 4, 16]))
@settings(max_examples=150, deadline=None)
def test_so_is_the_one_of_most_throughput(
    drawn: list[tuple[Span, float, float, float | None]], seed: int, in_flight: int
) -> None:
    servers, known = _instance(drawn, seed)
    errand = Errand(rows=4, objective=Objective.THROUGHPUT, in_flight=in_flight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MOST_PIPED", 1000)
        patch.setattr(routing, "MOST_CAPS", 1000)
        _check(servers, errand, known, routing.NEAR)


def _check(servers: Sequence[Server], errand: Errand, known: Knowledge, within: float) -> None:
    found = find_route(servers, BLOCKS, errand, known)
    best = min(_scores(servers, errand, known), default=None)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert best * (1 - 1e-9) <= found.score_s <= best * (1 + within) / (1 - within)
    peers = [stage.peer for stage in found.route.stages]
    assert len(set(peers)) == len(peers)
    assert found.route.span == BLOCKS


def test_a_server_is_never_used_twice_though_a_path_would() -> None:
    """p holds everything, slowly; q is quick in the middle: going back to p would cost least."""
    p, q, r = server("p", "0:6"), server("q", "2:4"), server("r", "4:6")
    quick, slow = TimeTable.flat(1e-4), TimeTable.flat(0.05)
    known = Knowledge(
        {
            p.peer: ServerFacts(decode=slow, prefill=quick, rtt_s=1e-4),
            q.peer: ServerFacts(decode=quick, prefill=quick, rtt_s=1e-4),
            r.peer: ServerFacts(decode=TimeTable.flat(0.2), prefill=quick, rtt_s=1e-4),
        }
    )
    found = find_route([p, q, r], BLOCKS, Errand(server_head=False), known)
    assert found is not None
    assert shape(found.route) == [("p", "0:6")]
    assert found.score_s == pytest.approx(min(_scores([p, q, r], Errand(server_head=False), known)))


def test_a_gap_has_no_route() -> None:
    assert find_route([server("a", "0:2"), server("b", "3:6")], BLOCKS, Errand(), NOTHING) is None
    assert find_route([], BLOCKS, Errand(), NOTHING) is None


def test_what_a_token_takes_is_what_the_choice_counted() -> None:
    servers, known = _instance(
        [(Span(0, 3), 0.004, 0.001, 0.002), (Span(3, 6), 0.02, 0.0, None)], 3
    )
    errand = Errand(rows=3)
    found = find_route(servers, BLOCKS, errand, known)
    assert found is not None
    assert token_s(found.route, servers, errand, known) == pytest.approx(found.latency_s)


# Spreading ----------------------------------------------------------------------------------


@given(
    drawn=_SERVERS, seed=st.integers(0, 99), objective=st.sampled_from(["latency", "throughput"])
)
@settings(max_examples=60, deadline=None)
def test_spreading_costs_little(
    drawn: list[tuple[Span, float, float, float | None]], seed: int, objective: Objective
) -> None:
    servers, known = _instance(drawn, seed)
    errand = Errand(objective=objective)
    luck = random.Random(seed)
    factors = spread_factors([luck.random() for _ in servers])
    found = find_route(servers, BLOCKS, errand, known, factors)
    if found is None:
        return
    index = {s.peer: i for i, s in enumerate(servers)}
    taken = [servers[index[stage.peer]] for stage in found.route.stages]
    true_s = token_s(found.route, taken, errand, known)
    if errand.objective is Objective.LATENCY:
        assert true_s <= min(_scores(servers, errand, known)) * (1 + SPREAD) * (1 + 1e-9)
    assert true_s <= found.latency_s * (1 + 1e-9)


def _arrivals(speeds: dict[str, float], clients: int, rtts: dict[str, float]) -> dict[str, int]:
    """Clients come one after the other and stay; each sees how many rows the others decode."""
    servers = [server(name, "0:30") for name in speeds]
    rows, luck = dict.fromkeys(speeds, 0), random.Random(0)
    for _ in range(clients):
        facts = {
            PeerId(name): ServerFacts(
                # Twice the rows take nearly twice as long, as on a processor.
                decode=TimeTable((1, 2), (0,), ((block_s,), (1.8 * block_s,))),
                prefill=TimeTable.flat(0.0),
                decode_rows=rows[name],
                rtt_s=rtts[name],
            )
            for name, block_s in speeds.items()
        }
        factors = spread_factors([luck.random() for _ in servers])
        errand = Errand(server_head=False)
        found = find_route(servers, Span(0, 30), errand, Knowledge(facts), factors)
        assert found is not None
        rows[found.route.stages[0].peer] += 1
    return rows


def test_clients_spread_over_replicas_in_proportion_to_speed() -> None:
    rows = _arrivals({"fast": 1e-3, "slow": 2e-3}, 30, {"fast": 0.01, "slow": 0.01})
    assert rows["fast"] + rows["slow"] == 30
    assert 1.6 < rows["fast"] / rows["slow"] < 2.6


def test_clients_that_see_the_same_at_once_spread_over_equals() -> None:
    servers = [server(name, "0:30") for name in "abcd"]
    picks = []
    for seed in range(80):
        luck = random.Random(seed)
        factors = spread_factors([luck.random() for _ in servers])
        found = find_route(servers, Span(0, 30), Errand(), NOTHING, factors)
        assert found is not None
        picks.append(found.route.stages[0].peer)
    assert all(10 <= picks.count(PeerId(name)) <= 30 for name in "abcd")


def test_a_far_replica_is_left_alone_until_the_near_ones_are_slow() -> None:
    rtts = {"near": 0.004, "other": 0.004, "far": 0.160}
    speeds = dict.fromkeys(rtts, 5e-4)
    assert _arrivals(speeds, 8, rtts)["far"] == 0
    crowded = _arrivals(speeds, 40, rtts)
    assert 0 < crowded["far"] < crowded["near"]


def test_a_far_replica_serves_when_the_near_ones_have_no_kv_left() -> None:
    near, far = server("near", "0:30"), server("far", "0:30")

    def known(free: int, waiting: int = 0) -> Knowledge:
        return Knowledge(
            {
                near.peer: ServerFacts(rtt_s=0.002, free_tokens=free, waiting=waiting),
                far.peer: ServerFacts(rtt_s=0.160, free_tokens=9000),
            }
        )

    ask = {"kv_tokens": 500, "server_head": False}
    assert shape(chosen([near, far], known(501), **ask)) == [("near", "0:30")]
    assert shape(chosen([near, far], known(499), **ask)) == [("far", "0:30")]
    assert shape(chosen([near, far], known(501, waiting=2), **ask)) == [("far", "0:30")]
    assert shape(chosen([near], known(0), **ask)) == [("near", "0:30")]


# What counts -----------------------------------------------------------------------------------


def test_more_stages_where_they_are_quicker_and_near() -> None:
    servers = [server("cpu", "0:30", 4.0), server("a", "0:15", 200.0), server("b", "15:30", 200.0)]

    def known(rtt_s: float) -> Knowledge:
        return Knowledge({s.peer: ServerFacts(rtt_s=rtt_s) for s in servers})

    assert shape(chosen(servers, known(0.01))) == [("a", "0:15"), ("b", "15:30")]
    assert shape(chosen(servers, known(0.6))) == [("cpu", "0:30")]


def test_with_the_server_head_the_ring_decides_not_the_clients_way() -> None:
    """Two halves next to each other, far away; two others near to us, far from each other."""
    servers = [
        server(f"{where}{half}", span)
        for where in ("far", "near")
        for half, span in ((0, "0:15"), (1, "15:30"))
    ]
    rtts = {"far0": 0.2, "far1": 0.2, "near0": 0.01, "near1": 0.01}
    ways = {
        (PeerId("far0"), PeerId("far1")): LinkFacts(0.001),
        (PeerId("near0"), PeerId("near1")): LinkFacts(0.04),
    }
    facts = {PeerId(name): ServerFacts(rtt_s=rtt_s) for name, rtt_s in rtts.items()}
    known = Knowledge(facts, ways)
    assert [p for p, _ in shape(chosen(servers, known))] == ["far0", "far1"]
    assert [p for p, _ in shape(chosen(servers, known, server_head=False))] == ["near0", "near1"]


def test_throughput_splits_blocks_evenly_where_latency_would_not() -> None:
    fast, slow = server("fast", "0:20"), server("slow", "10:30")
    facts = {
        fast.peer: ServerFacts(decode=TimeTable.flat(0.001), prefill=TimeTable.flat(0.0)),
        slow.peer: ServerFacts(decode=TimeTable.flat(0.0011), prefill=TimeTable.flat(0.0)),
    }
    known = Knowledge(facts)
    assert shape(chosen([fast, slow], known)) == [("fast", "0:20"), ("slow", "20:30")]
    piped = shape(chosen([fast, slow], known, objective=Objective.THROUGHPUT, in_flight=8))
    assert piped == [("fast", "0:16"), ("slow", "16:30")]


def test_a_slow_uplink_is_a_bottleneck_of_batches() -> None:
    servers = [server("a", "0:15"), server("thin", "15:30"), server("wide", "15:30", 40.0)]
    a, thin, wide = (s.peer for s in servers)
    ways = {(a, thin): LinkFacts(0.005, 2e5), (a, wide): LinkFacts(0.005, 1e8)}
    known = Knowledge({s.peer: ServerFacts(rtt_s=0.01) for s in servers}, ways)
    assert [p for p, _ in shape(chosen(servers, known, rows=16))] == ["a", "wide"]
