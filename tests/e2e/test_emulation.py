"""An emulated network carries what it should, and leaves nothing behind. Needs root.

Margins are wide: the machine may be busy. `scripts/emulate --check` measures.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.emulation import accuracy, leftovers
from benchmarks.emulation.network import ROOT, Emulation
from bloombee.config.networks import NetworkFile
from bloombee.errors import SettingsError, SwarmError
from tests.e2e.dht_processes import wait_until
from tests.e2e.namespaces import need_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MBPS, RTT_MS = 40.0, 30.0
TWO = NetworkFile.model_validate({"hosts": [{"name": "host", "count": 2}]})
HOLDS = """
import os, subprocess, sys
from benchmarks.emulation.network import Emulation
from bloombee.config.networks import NetworkFile
with Emulation(NetworkFile.model_validate({"hosts": [{"name": "host", "count": 2}]})) as network:
    command = [*network.place("host-0").prefix, sys.executable, "-c", "input()"]
    daemon = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    with open(sys.argv[1], "w") as file:
        file.write(f"{network._up.pid} {daemon.pid} {network.here}\\n")
    os.read(0, 1)
"""


@pytest.fixture(autouse=True, scope="module")
def _root() -> Iterator[None]:
    need_namespaces()
    yield


def test_rate_round_trip_and_counters() -> None:
    found: list[accuracy.Result] = []
    network = accuracy.network_of(MBPS, RTT_MS)
    accuracy.check(network, [accuracy.Case("host-0", "host-1", MBPS, RTT_MS)], found.append)
    (result,) = found
    assert 0.75 * MBPS < result.mbps < 1.1 * MBPS
    assert result.measured.rtt_low_ms > RTT_MS - 0.1
    assert result.measured.rtt_ms < RTT_MS + 5.0


def test_a_host_is_reached_from_here_and_rates_change_while_it_runs() -> None:
    with Emulation(TWO, here_as="host-1") as network:
        assert network.place("host-1").prefix == ()
        network.set_rate("host-0", up_mbps=20, down_mbps=MBPS)
        network.set_delay("host-0", "host-1", 10.0)
        network.set_path_rate("host-0", "host-1", 1000.0)
        network.set_loss("host-0", "host-1", 0.0)
        before = network.traffic()
        result = accuracy.measure(network, accuracy.Case("host-1", "host-0", MBPS, 20.0), 9000)
        traffic = network.traffic().since(before)
        assert 0.7 * MBPS < result.mbps < 1.1 * MBPS
        assert 19.9 < result.measured.rtt_ms < 26.0
        there, back = traffic.pairs["host-1", "host-0"], traffic.pairs["host-0", "host-1"]
        # 2.5 s at 5 MB/s; what comes back is little.
        assert 6e6 < there.bytes < 20e6
        assert back.bytes < there.bytes / 10
        assert traffic.down_busy_s["host-0"] == pytest.approx(there.bytes * 8 / MBPS / 1e6, rel=0.1)
        with pytest.raises(SettingsError, match="no host is called 'host-7'; did you mean"):
            network.set_rate("host-7", 1.0)
        with pytest.raises(SettingsError, match="should be greater than 0"):
            network.set_rate("host-0", 0.0)
    with pytest.raises(SwarmError, match="does not run"):
        network.traffic()


def test_several_networks_stand_at_once_with_cubic_in_each() -> None:
    with Emulation(TWO) as one, Emulation(TWO) as other:
        assert one.address("host-0") != other.address("host-0")
        for network in (one, other):
            command = [*network.place("host-0").prefix, "ip", "route"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert "congctl cubic" in shown
            command = ["ip", "route", "get", network.address("host-0")]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert f"src {network.here}" in shown


def test_kill_9_of_the_parent_ends_the_switch_and_its_devices(tmp_path: Path) -> None:
    told = tmp_path / "told"
    parent = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(told)], cwd=ROOT, stdin=subprocess.PIPE
    )
    with parent:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"), 20.0)
        switch, daemon, here = told.read_text().split()
        try:
            assert here in _addresses()
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            wait_until(lambda: leftovers.started_ticks(int(switch)) == 0, 5.0)
            assert here not in _addresses()
        finally:
            parent.kill()
    # Its input closed with the parent; `--clean` is for those that don't care.
    wait_until(lambda: leftovers.started_ticks(int(daemon)) == 0, 5.0)


def test_clean_ends_what_outlives_its_network_and_nothing_else() -> None:
    with Emulation(TWO) as stays, Emulation(TWO) as goes:
        running = [
            subprocess.Popen([*network.place("host-0").prefix, "sleep", "60"])
            for network in (stays, goes)
        ]
        wait_until(lambda: all(_inside(process.pid) for process in running), 5.0)
        goes.__exit__()
        assert [each.pid for each in leftovers.find()] == [running[1].pid]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.emulation.command", "--clean"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"ended {running[1].pid}: sleep 60\n"
        assert running[1].wait(5.0) == -signal.SIGKILL
        assert running[0].poll() is None
        running[0].kill()
        running[0].wait()


def _inside(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _addresses() -> str:
    command = ["ip", "-4", "-o", "addr"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
