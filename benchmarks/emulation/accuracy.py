"""How exact the emulation is: real TCP connections between hosts, beside what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import msgspec

from benchmarks.emulation.network import ROOT, Emulation
from benchmarks.emulation.probe import Measured
from bloombee.config.networks import HostKind, NetworkFile, PathKind
from bloombee.errors import SwarmError
from bloombee.swarm import tether

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bloombee.cli.child import Place

TRANSFER_S = 2.5
SLOW_TRANSFER_S = 5.0
"""Where round trips are long, TCP takes longer to find the rate."""
SLOW_FROM_MS = 40.0
DEADLINE_S = 60.0
TCP_HEADERS = 52
RATES = ((20.0, 0.0), (125.0, 0.0), (250.0, 0.0), (500.0, 0.0))
TRIPS = ((None, 0.0), (100.0, 5.0), (100.0, 20.0), (100.0, 80.0), (20.0, 40.0), (500.0, 20.0))


@dataclass(frozen=True, slots=True)
class Case:
    """One direction, and what one connection should get; no rate: what the machine can do."""

    source: str
    target: str
    mbps: float | None
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a case gave. `mbps` counts IP packets; `cpu` is the switch's share of a core."""

    case: Case
    measured: Measured
    mbps: float
    cpu: float
    late_us: float
    load: float


def network_of(mbps: float | None, rtt_ms: float) -> NetworkFile:
    """Two hosts and what lies between."""
    return NetworkFile(
        hosts=(HostKind(name="host", count=2, up_mbps=mbps, down_mbps=mbps),),
        paths=(PathKind.model_validate({"from": "*", "to": "*", "rtt_ms": rtt_ms}),),
    )


def check_usual(report: Callable[[Result], None]) -> None:
    """Rates and round trips as benchmarks use them, each in a network of its own."""
    for mbps, rtt_ms in (*RATES, *TRIPS):
        case = Case("host-0", "host-1", mbps, rtt_ms)
        check(network_of(mbps, rtt_ms), [case], report)


def check_network(network: NetworkFile, report: Callable[[Result], None]) -> None:
    """Every pair of hosts of a network, one after the other, in both directions."""
    names = network.host_names
    pairs = [(one, other) for one in names for other in names if one != other]
    check(network, [_case(network, *pair) for pair in pairs], report)


def check(network: NetworkFile, cases: list[Case], report: Callable[[Result], None]) -> None:
    """Measure cases in a network; nothing else runs in it."""
    with Emulation(network) as emulation:
        for case in cases:
            report(measure(emulation, case, network.packet_bytes))


def _case(network: NetworkFile, source: str, target: str) -> Case:
    there, back = network.path(source, target), network.path(target, source)
    limits = (network.kind_of(source).up_mbps, there.mbps, network.kind_of(target).down_mbps)
    known = [limit for limit in limits if limit is not None]
    rtt_ms = there.one_way_ms + back.one_way_ms
    if there.loss and rtt_ms:
        # What one TCP connection makes of random loss: Mathis et al. 1997, equation 3.
        segment_bits = (network.packet_bytes - TCP_HEADERS) * 8
        known.append(segment_bits / rtt_ms / 1e3 * sqrt(1.5 / there.loss))
    return Case(source, target, min(known, default=None), rtt_ms)


def measure(emulation: Emulation, case: Case, mtu: int) -> Result:
    """One case in a running network, whose packets are `mtu` bytes at most."""
    seconds = SLOW_TRANSFER_S if case.rtt_ms >= SLOW_FROM_MS else TRANSFER_S
    with _server(emulation.place(case.target)) as port:
        before = emulation.traffic()
        arguments = ("measure", emulation.address(case.target), port, str(seconds))
        command = _probe(emulation.place(case.source), *arguments)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode != 0:
            raise SwarmError(f"the probe of {case.source} failed: {done.stderr.strip()}")
        found = msgspec.json.decode(done.stdout, type=Measured)
        traffic = emulation.traffic().since(before)
    # The connection's set-up and its round trips cost the switch next to nothing.
    return Result(
        case=case,
        measured=found,
        mbps=found.mbps * mtu / (mtu - TCP_HEADERS),
        cpu=traffic.cpu_s / seconds,
        late_us=traffic.late_s * 1e6,
        load=os.getloadavg()[0],
    )


@contextmanager
def _server(place: Place) -> Iterator[str]:
    """A probe that answers at a place, for the block; its port."""
    process = subprocess.Popen(
        _probe(place, "serve", place.host),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            if process.stdout is None or not (port := process.stdout.readline().strip()):
                raise SwarmError(f"the probe at {place.host} did not start")
            yield port
        finally:
            process.kill()


def _probe(place: Place, *arguments: str) -> list[str]:
    """The command of a probe, which dies with this thread."""
    tied = (sys.executable, "-I", "-S", str(tether.__file__), "signal", str(os.getpid()), "-1")
    return [*tied, *place.prefix, sys.executable, "-m", "benchmarks.emulation.probe", *arguments]
