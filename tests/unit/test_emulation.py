"""The emulated network's bookkeeping, in virtual time, and its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulation.fabric import Fabric
from benchmarks.emulation.leftovers import started_ticks
from benchmarks.emulation.line import Line
from benchmarks.emulation.namespace import HEADER
from benchmarks.emulation.plan import Line as LinePlan
from benchmarks.emulation.plan import PairCount, Plan, plan_of
from benchmarks.emulation.plan import Path as PathPlan
from benchmarks.emulation.switch import LAST_WAIT_S, on_the_line, wait_for
from benchmarks.emulation.unprivileged import differs, line_at, place_at
from bloombee.config.files import config_path
from bloombee.config.lines import LineShape
from bloombee.config.networks import NetworkFile, read_network
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

MBIT = 1e6 / 8
NAMES = sorted(path.stem for path in config_path("networks").glob("*.yaml"))


def fabric(
    lines: list[LinePlan], paths: dict[tuple[int, int], PathPlan] | None = None, **settings: float
) -> Fabric:
    hosts = range(len(lines))
    matrix = tuple(tuple((paths or {}).get((i, j), PathPlan()) for j in hosts) for i in hosts)
    names = tuple(f"host-{host}" for host in hosts)
    settings = {"queue_s": 10.0, **settings}
    return Fabric(Plan(names, tuple(lines), matrix, mtu=1500, **settings))  # pyright: ignore[reportArgumentType] (numbers of the plan)


def arrivals(network: Fabric) -> list[tuple[float, int, bytes]]:
    """All that is under way, with the time each is delivered."""
    found: list[tuple[float, int, bytes]] = []
    while network.next_s != float("inf"):
        now_s = network.next_s
        found += [(now_s, *each) for each in network.due(now_s)]
    return found


# A line ----------------------------------------------------------------------------------


def test_a_line_sends_one_packet_after_the_other() -> None:
    line = Line(rate=1000.0, queue_s=10.0)
    assert line.take(5.0, 5.0, 500) == (5.0, 5.5)
    assert line.take(5.1, 5.1, 1000) == (5.5, 6.5)
    assert line.take(9.0, 9.0, 1000) == (9.0, 10.0)
    assert line.busy_s == 2.5


def test_two_lines_of_one_rate_cost_the_time_of_one() -> None:
    up, down = Line(1000.0, 1.0), Line(1000.0, 1.0)
    passed = up.take(0.0, 0.0, 100)
    assert passed is not None
    assert down.take(*passed, 100) == passed == (0.0, 0.1)


def test_the_tail_of_a_full_queue_is_dropped_and_an_empty_one_takes_any_packet() -> None:
    line = Line(rate=1000.0, queue_s=0.5)
    assert line.take(0.0, 0.0, 5000) == (0.0, 5.0)
    assert line.take(4.75, 4.75, 251) is None
    assert line.take(4.75, 4.75, 250) == (5.0, 5.25)


def test_a_queue_in_bytes_keeps_its_size_when_the_rate_changes() -> None:
    line = Line(rate=1000.0, queue_s=99.0, queue_bytes=300.0)
    for now_s, rate in ((0.0, 1024.0), (1e3, 16.0)):
        line.set_rate(rate)
        assert line.take(now_s, now_s, 300) is not None
        assert line.take(now_s, now_s, 1) is None


@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(40, 9000)), min_size=1, max_size=60),
    st.floats(1.0, 1000.0),
)
def test_a_line_never_exceeds_its_rate_nor_reorders(
    packets: list[tuple[float, int]], mbps: float
) -> None:
    line = Line(mbps * MBIT, queue_s=0.05)
    now_s, last_s, sent = 0.0, 0.0, 0
    for gap_s, size in packets:
        now_s += gap_s
        passed = line.take(now_s, now_s, size)
        if passed is None:
            continue
        assert now_s <= passed[0] < passed[1]
        assert passed[0] >= last_s
        last_s = passed[1]
        sent += size
        assert last_s - now_s <= 0.05 + 9000 / (mbps * MBIT) + 1e-9
    assert line.busy_s == pytest.approx(sent / (mbps * MBIT))
    assert last_s >= line.busy_s - 1e-9


# Between hosts ---------------------------------------------------------------------------


def test_a_packet_takes_the_slower_line_and_the_delay() -> None:
    lines = [LinePlan(up=1000.0), LinePlan(down=500.0)]
    network = fabric(lines, {(0, 1): PathPlan(delay_s=0.25)})
    network.send(1.0, (0, 1), b"x", 100, 1)
    assert arrivals(network) == [(pytest.approx(1.0 + 0.2 + 0.25), 1, b"x")]


def test_a_path_has_a_rate_of_its_own() -> None:
    network = fabric([LinePlan(up=1000.0), LinePlan()], {(0, 1): PathPlan(rate=100.0)})
    network.send(0.0, (0, 1), b"x", 100, 1)
    network.send(0.0, (1, 0), b"y", 100, 1)
    assert arrivals(network) == [(0.0, 0, b"y"), (pytest.approx(1.0), 1, b"x")]


def test_a_far_sender_does_not_hold_up_a_near_one() -> None:
    lines = [LinePlan(), LinePlan(), LinePlan(down=1000.0)]
    network = fabric(lines, {(0, 2): PathPlan(delay_s=5.0)})
    network.send(0.0, (0, 2), b"far", 100, 1)
    network.send(0.1, (1, 2), b"near", 100, 1)
    assert [(each[2], round(each[0], 6)) for each in arrivals(network)] == [
        (b"near", 0.2),
        (b"far", 5.1),
    ]


def test_two_senders_share_a_line_down() -> None:
    network = fabric([LinePlan(), LinePlan(), LinePlan(down=1000.0)])
    for source in (0, 1, 0, 1):
        network.send(0.0, (source, 2), b"x", 50, 1)
    assert [round(each[0], 6) for each in arrivals(network)] == [0.05, 0.1, 0.15, 0.2]


def test_packets_stay_in_order_when_the_delay_shrinks() -> None:
    network = fabric([LinePlan(), LinePlan()], {(0, 1): PathPlan(delay_s=1.0)})
    network.send(0.0, (0, 1), b"first", 100, 1)
    network.set_path(0, 1, PathPlan(delay_s=0.0))
    network.send(0.5, (0, 1), b"second", 100, 1)
    assert arrivals(network) == [(1.0, 1, b"first"), (1.0, 1, b"second")]


def test_a_rate_that_changes_counts_for_what_comes_next() -> None:
    network = fabric([LinePlan(up=1000.0), LinePlan()])
    network.send(0.0, (0, 1), b"1", 100, 1)
    network.set_line(0, LinePlan(up=100.0))
    network.send(0.0, (0, 1), b"2", 10, 1)
    assert [round(each[0], 6) for each in arrivals(network)] == [0.1, 0.2]


def test_loss_is_of_the_seed_and_about_as_much_as_asked_for() -> None:
    def lost(seed: int) -> list[int]:
        network = fabric([LinePlan()] * 2, {(0, 1): PathPlan(loss=0.1)}, seed=seed)
        for number in range(2000):
            network.send(0.0, (0, 1), number.to_bytes(2, "big"), 100, 1)
        came = {int.from_bytes(packet, "big") for _, _, packet in arrivals(network)}
        assert network.counts()[0][1].lost == 2000 - len(came)
        return sorted(set(range(2000)) - came)

    assert lost(1) == lost(1) != lost(2)
    assert 140 < len(lost(1)) < 260


def test_counters_say_what_was_sent_dropped_and_cut() -> None:
    network = fabric([LinePlan(up=1000.0), LinePlan()], queue_s=0.35)
    for _ in range(4):
        network.send(0.0, (0, 1), b"x", 100, 2)
    before = network.counts()[0][1]
    assert before == PairCount(packets=6, bytes=300, dropped=2, lost=0)
    network.set_cut(0, 1, cut=True)
    network.send(1.0, (0, 1), b"x", 100, 1)
    network.send(1.0, (1, 0), b"x", 40, 1)
    assert network.counts()[0][1] - before == PairCount(lost=1)
    assert network.counts()[1][0] == PairCount(packets=1, bytes=40)
    assert network.ups[0].busy_s == pytest.approx(0.3)


def test_runs_of_segments_count_as_the_packets_they_are() -> None:
    headers = bytes([0x45, *bytes(19)]) + bytes([*bytes(12), 0x80, *bytes(19)])
    joined = HEADER.pack(1, 1, len(headers), 1448, 0, 0) + headers + bytes(3000)
    assert on_the_line(joined) == (3000 + 3 * 52, 3)
    assert on_the_line(HEADER.pack(0, 0, 0, 0, 0, 0) + headers) == (52, 1)


def test_the_last_bit_of_a_long_wait_is_a_wait_of_its_own() -> None:
    assert wait_for(-1.0) == 0.0
    assert wait_for(LAST_WAIT_S) == LAST_WAIT_S
    assert wait_for(0.1) == pytest.approx(0.1 - LAST_WAIT_S)
    assert wait_for(float("inf")) == 1.0


def test_a_process_is_known_by_its_start() -> None:
    assert started_ticks(os.getpid()) > 0
    assert started_ticks(1 << 30) == 0


# Files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_ours_is_read(name: str) -> None:
    network = read_network(name)
    assert "client" in network.host_names
    assert len(network.host_names) >= 4
    assert len(plan_of(network).names) == len(network.host_names) + 1


def test_the_papers_rates() -> None:
    rates = {name: read_network(name).hosts[0].up_mbps for name in ("e1", "e2", "e3", "e4", "e5")}
    assert rates == {"e1": None, "e2": 500, "e3": 250, "e4": 125, "e5": 20}
    plan = plan_of(read_network("e6"), "client")
    path = plan.paths[plan.names.index("california")][plan.names.index("canada")]
    assert (path.rate, path.delay_s, plan.mtu, plan.here) == (160 * MBIT, 0.035, 9000, 0)
    assert plan.queue_s == pytest.approx(0.12)


def test_the_last_path_that_matches_counts_and_a_way_back_can_differ() -> None:
    network = NetworkFile.model_validate(
        {
            "hosts": [{"name": "a"}, {"name": "b", "count": 2}],
            "paths": [
                {"from": "*", "to": "*", "rtt_ms": 10},
                {"from": "b", "to": "b", "rtt_ms": 2, "mbps": 7},
                {"from": "b-1", "to": "a", "delay_ms": 30, "one_way": True},
            ],
        }
    )
    ways = [("a", "b-0"), ("b-0", "b-1"), ("a", "b-1"), ("b-1", "a")]
    assert [network.path(*way).one_way_ms for way in ways] == [5, 1, 5, 30]
    assert network.path("b-0", "b-1").mbps == 7
    assert network.packet_bytes == 9000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "hosts is required"),
        (
            "hosts: [{name: a, ups_mbps: 3}]",
            "hosts[0]: unknown key ups_mbps; did you mean up_mbps?",
        ),
        ("hosts: [{name: a, up_mbps: 0}]", "hosts[0].up_mbps: should be greater than 0, got 0"),
        ("hosts: [{name: a}, {name: a}]", "two hosts are called 'a'; use count, or other names"),
        ("hosts: [{name: here}]", "no host can be called 'here'"),
        ("hosts: [{name: a, count: 65}]", "65 hosts are too many; at most 64"),
        ("hosts: [{name: a}]\npaths: [{from: b, to: a}]", "paths name 'b', no host"),
        (
            "hosts: [{name: a}]\npaths: [{from: a, to: a, loss: 1}]",
            "paths[0].loss: should be less than 1, got 1",
        ),
        (
            "hosts: [{name: a}]\npaths: [{from: a, to: a, rtt_ms: 2, delay_ms: 1}]",
            "paths[0]: give delay_ms (one way) or rtt_ms (both ways), not both",
        ),
        ("hosts: [{name: a}]\nqueue_ms: 1\nqueue_kb: 1", "give queue_ms or queue_kb, not both"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "net.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as raised:
        read_network(file)
    assert str(raised.value).startswith(f"{file}: {complaint}")
    assert "\n" not in str(raised.value)


def test_a_network_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match="there is no file e44; did you mean e4"):
        read_network("e44")
    with pytest.raises(SettingsError, match="no host called 'sever'; did you mean server"):
        plan_of(NetworkFile.model_validate({"hosts": [{"name": "server"}]}), "sever")


# Without root -----------------------------------------------------------------------------


def test_a_process_plays_the_line_of_its_host() -> None:
    network = NetworkFile.model_validate(
        {
            "hosts": [{"name": "a", "up_mbps": 20, "down_mbps": 100}, {"name": "b", "count": 2}],
            "paths": [
                {"from": "a", "to": "b-0", "rtt_ms": 40, "mbps": 50},
                {"from": "a", "to": "b-1", "rtt_ms": 20},
            ],
        }
    )
    assert LineShape.parse(line_at(network, "a")) == LineShape(20 * MBIT, 50 * MBIT, 0.015)
    assert LineShape.parse(line_at(network, "b-1")) == LineShape(1e5 * MBIT, 1e5 * MBIT, 0.005)
    assert place_at(network, "a").flags == ("--emulate-link", line_at(network, "a"))
    assert differs(network) == "unequal paths"
    assert differs(read_network("e5")) == ""
    assert differs(read_network("mobile")) == "loss and unequal paths"
