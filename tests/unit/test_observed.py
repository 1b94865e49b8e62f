"""From servers' reports to a cluster: what is measured, what is guessed, who is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bloombee.core import PeerId, Span
from bloombee.planner.observed import UNKNOWN_BYTES_PER_S, Seen, observe, problem, profile
from bloombee.planner.plan import Plan
from bloombee.planner.planning import Problem, plan
from bloombee.planner.profiles import ModelFacts
from bloombee.planner.standing import standing
from bloombee.planner.workload import Head, Workload
from bloombee.protocol.report_messages import CostTable, LinkReport, TimeGrid

MODEL = ModelFacts("m", 12, 64, 10**6, 500_000, 512, 64, 4 * 10**6, 4 * 10**6)
GRID = TimeGrid((1, 8), (0, 256), ((1e-3, 2e-3), (2e-3, 4e-3)))
COSTS = CostTable(
    hardware="a cpu",
    decode=GRID,
    prefill=TimeGrid((16, 128), (0,), ((2e-3,), (1e-2,))),
    head=None,
    pass_s=1e-3,
    device_bytes=10**9,
    host_bytes=0,
    block_bytes=10**6,
    kv_bytes_per_token=512,
    watts=20.0,
)


def _costs(**changes: Any) -> CostTable:
    return msgspec.structs.replace(COSTS, **changes)


def _grid(seconds: float) -> TimeGrid:
    return TimeGrid((1,), (0,), ((seconds,),))


def _seen(name: str, span: Span, *links: LinkReport, **changes: Any) -> Seen:
    return Seen(PeerId(name), span, _costs(**changes), links, rtt_s=0.04)


def test_a_table_becomes_a_profile_that_offloads_nothing() -> None:
    made = profile(PeerId("a"), COSTS, MODEL)
    assert made.decode.at(8, 256) == 4e-3
    assert made.decode.at(16, 0) == pytest.approx(2e-3 + 8e-3 / 7)
    assert made.head.at(1, 0) == pytest.approx(4e-3)  # as its blocks, by bytes
    assert (made.watts, made.host_bytes, made.streams_weights) == (20.0, 0, False)
    measured = profile(PeerId("a"), _costs(watts=0.0, measured_watts=9.0, head=_grid(7e-3)), MODEL)
    assert measured.watts == 9.0 and measured.head.at(3, 0) == 7e-3


def test_measured_links_stay_and_others_are_guessed_from_their_ends() -> None:
    links = (
        LinkReport("b", rtt_s=0.02, bytes_per_s=4e6),
        LinkReport("stranger", rtt_s=0.01, bytes_per_s=9e9),
    )
    found = observe(
        [
            _seen("a", Span(0, 4), *links),
            _seen("b", Span(4, 8), LinkReport("c", rtt_s=0.06, bytes_per_s=1e6)),
            _seen("c", Span(8, 12)),
        ],
        MODEL,
    )
    net = found.cluster.network
    assert net.bytes_per_s[0, 1] == 4e6 and net.latency_s[0, 1] == 0.01
    assert net.bytes_per_s[1, 2] == 1e6
    assert net.bytes_per_s[0, 2] == 1e6  # a can send at 4e6, c is known to take 1e6
    assert net.latency_s[1, 0] == 0.01  # as the way there
    assert net.latency_s[0, 3] == net.latency_s[3, 0] == 0.02  # measured from here
    assert (0, 1) not in found.guessed and {(0, 2), (1, 0), (0, 3)} <= found.guessed


def test_nothing_known_of_links_is_a_modest_guess() -> None:
    alone = replace(_seen("a", Span(0, 12)), rtt_s=0.0)
    found = observe([alone], MODEL)
    assert found.cluster.network.bytes_per_s[0, 1] == UNKNOWN_BYTES_PER_S
    assert found.guessed == {(0, 1), (1, 0)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e30])
def test_links_that_make_no_sense_count_as_unknown(value: float) -> None:
    lie = LinkReport("b", rtt_s=value, bytes_per_s=value)
    itself = LinkReport("a", rtt_s=0.1, bytes_per_s=1.0)
    found = observe([_seen("a", Span(0, 6), lie, itself), _seen("b", Span(6, 12))], MODEL)
    assert (0, 1) in found.guessed
    assert found.cluster.network.bytes_per_s[0, 1] == UNKNOWN_BYTES_PER_S
    assert found.cluster.network.bytes_per_s[0, 0] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decode": _grid(math.nan)}, "decode has a pass of nan"),
        ({"decode": _grid(-1e-3)}, "decode has a pass of -0.001"),
        ({"decode": _grid(0.0)}, "decode has a pass of 0.0"),  # faster than any memory
        ({"prefill": _grid(1e9)}, "prefill has a pass of"),
        ({"head": _grid(math.inf)}, "head has a pass of inf"),
        ({"decode": TimeGrid((1, 2), (0,), ((1e-3,),))}, "has holes"),
        ({"decode": TimeGrid((1,), (0, 1), ((1e-3,),))}, "has holes"),
        ({"decode": TimeGrid((2, 1), (0,), ((1e-3,), (1e-3,)))}, "doesn't ascend"),
        ({"pass_s": math.nan}, "a pass of nan"),
        ({"device_bytes": 1 << 60}, "memory of"),
        ({"block_bytes": 1}, "blocks of 1 bytes"),
        ({"price_per_hour": -1.0}, "a price of -1.0"),
        ({"watts": math.inf}, "a power of inf"),
        ({"disk_bytes_per_s": math.nan}, "a bandwidth of"),
    ],
)
def test_nobody_plans_with_figures_that_no_machine_has(changes: Any, said: str) -> None:
    why = problem(_costs(**changes), MODEL)
    assert why is not None and said in why
    found = observe([_seen("liar", Span(0, 6), **changes), _seen("b", Span(6, 12))], MODEL)
    assert [server.peer for server in found.servers] == ["b"]
    assert found.refused == (f"liar: {why}",)


def test_a_server_that_tells_no_costs_is_left_out() -> None:
    found = observe([Seen(PeerId("old"), Span(0, 12), None)], MODEL)
    assert found.refused == ("old: it tells no costs",)


def test_a_plan_is_compared_with_the_placement_as_it_is() -> None:
    slow = {"decode": TimeGrid((1, 8), (0,), ((8e-3,), (16e-3,)))}

    def link(peer: str) -> LinkReport:
        return LinkReport(peer, rtt_s=0.001, bytes_per_s=1e9)

    servers = [
        _seen("fast", Span(0, 6), link("slow")),
        _seen("slow", Span(6, 12), link("fast"), **slow),
    ]
    found = observe(servers, MODEL)
    workload = Workload(batches=(8,), micro_batches=(4,), heads=(Head.SERVER,))
    task = Problem(MODEL, found.cluster, workload)
    now = standing(task, [server.span for server in servers])
    made = plan(task)
    assert isinstance(made, Plan)
    assert len(now.routes) == 1 and now.tokens_per_s > 0
    assert made.tokens_per_s > 1.5 * now.tokens_per_s
    assert standing(task, [Span(0, 6), Span(7, 12)]).routes == ()
