"""What the benchmarks of shaped links compute: rates, regrets, and when a choice has settled."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.link_drop import phases
from benchmarks.shaped.analysis import paired, per_second, regret, settled_after
from benchmarks.shaped.environments import (
    Wire,
    chosen,
    of_network,
    paper_ratio,
    rate_mbps,
    step_s,
    tokens_for,
    uniform,
)
from benchmarks.shaped.swarms import alike, least_us
from bloombee.config.networks import read_network
from bloombee.server.pacing import Pass

HOP_BYTES = 36_864


def test_at_the_rate_of_a_ratio_the_wire_takes_that_many_stages() -> None:
    rate = rate_mbps(6.5, HOP_BYTES, 0.068)
    assert rate is not None
    assert HOP_BYTES * 8 / (rate * 1e6) == pytest.approx(6.5 * 0.068)
    assert rate_mbps(0, HOP_BYTES, 0.068) is None


def test_rates_beside_the_paper_s_devices() -> None:
    assert paper_ratio(0) == 0
    assert paper_ratio(20) == pytest.approx(416_000 * 8 / 20e6 / 0.041)


def test_a_step_passes_stages_wires_and_delays() -> None:
    environment = uniform("E4", 1.1, 20, 3)
    assert environment.name == "E4, RTT 20 ms"
    assert environment.hops == [Wire(1.1, 20)] * 3
    assert environment.slowest == 1.1
    assert step_s(environment, 0.1, 3) == pytest.approx(0.3 + 2 * 0.11 + 3 * 0.01)


def test_tokens_fit_the_budget_within_bounds() -> None:
    assert tokens_for(10, 0.2, 128) == 50
    assert tokens_for(10, 0.01, 128) == 128
    assert tokens_for(10, 5.0, 128) == 12
    assert tokens_for(10, 5.0, 8) == 8


def test_sites_have_their_own_rates_and_round_trips() -> None:
    sites = of_network("E6", read_network("e6"))
    assert [wire.rtt_ms for wire in sites.hops] == [65, 20, 70]
    assert sites.hops[0].ratio == pytest.approx(paper_ratio(210))
    assert sites.slowest == sites.hops[0].ratio
    assert sites.wire(3, 2) == sites.wire(2, 3)
    with pytest.raises(KeyError, match="nothing between 1 and 1"):
        sites.wire(1, 1)


def test_each_environment_comes_with_each_round_trip_and_the_sites_once() -> None:
    found = [each.name for each in chosen(["E1", "E5", "E6"], [0, 80], read_network("e6"))]
    assert found == [
        *("E1, RTT 0 ms", "E5, RTT 0 ms", "E1, RTT 80 ms", "E5, RTT 80 ms", "E6, three sites"),
    ]


def test_a_ratio_s_interval_shrinks_with_pairs_that_agree() -> None:
    assert paired([3.0], [1.0]).high == inf
    ratio = paired([2.0, 2.2, 4.2], [1.0, 1.0, 2.0])
    assert ratio.median == pytest.approx(2.1)
    assert 1.8 < ratio.low < 2.1 < ratio.high < 2.4
    exact = paired([2.0, 4.0], [1.0, 2.0])
    assert (exact.low, exact.high) == pytest.approx((2.0, 2.0))


def test_regret_is_against_the_best_fixed_setting() -> None:
    found = regret({"slow": [50.0, 50.0], "fast": [100.0, 102.0]}, [95.0, 96.9])
    assert found.best == "fast"
    assert found.share == pytest.approx(0.05)
    assert not found.meets(0.03)
    assert found.meets(0.06)


def test_regret_of_one_round_is_taken_as_it_is() -> None:
    assert regret({"only": [100.0]}, [98.0]).meets(0.03)
    assert not regret({"only": [100.0]}, [96.0]).meets(0.03)
    assert regret({"only": [100.0]}, [110.0]).share == pytest.approx(-0.1)


def test_events_by_the_second() -> None:
    assert per_second([0.1, 0.2, 1.5, 2.9, 3.0], 0.0, 3.0) == [2, 1, 1]
    assert per_second([0.5, 1.5, 2.5], 0.0, 3.0, 2.0) == [1.0, 0.5]


def test_a_choice_has_settled_when_no_later_window_is_too_slow() -> None:
    slow = [i / 10 for i in range(40)]  # 10 a second for 4 s
    fast = [4 + i / 50 for i in range(300)]  # then 50 a second for 6 s
    assert settled_after(slow + fast, (0, 10), 45, 2) == 4.0
    assert settled_after(slow + fast, (0, 10), 5, 2) == 0.0
    assert settled_after(slow + fast, (0, 10), 60, 2) is None


def test_phases_follow_each_other() -> None:
    plan = phases([10, 25, 20], 0.26, 6.5)
    assert [(p.start_s, p.end_s) for p in plan] == [(0, 10), (10, 35), (35, 55)]
    assert [p.ratio for p in plan] == pytest.approx([0.26, 6.5, 0.26])
    assert plan[1].second_half == (22.5, 35)


def test_devices_of_all_swarms_are_made_alike() -> None:
    passes = [Pass(0, 9, 9, 1, 32, 0), Pass(0, 7, 7, 1, 32, 0), Pass(0, 1, 1, 1, 32, 5)]
    assert least_us([*passes, Pass(0, 4, 4, 1, 8, 0), Pass(0, 3, 3, 1, 0, 9)]) == {32: 7, 8: 4}
    assert alike([{32: 70, 8: 40}, {32: 75, 8: 30, 3: 50}]) == {3: 30, 8: 30, 32: 70}
