"""What lies between the hosts of a pipeline, in terms of its own speed: no clock, no I/O.

The ratio of a link is the time that the raw rows of one full-batch decode hop take on the wire
over the time that one stage, alone, computes for them. So a rate follows from a ratio, once
the stages' time is measured, and results carry over to faster devices on faster links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.config.networks import NetworkFile

PAPER_RATIOS = {"E1": 0.0, "E2": 0.17, "E3": 0.6, "E4": 1.1, "E5": 6.5}
PAPER_HOP_BYTES = 416_000
PAPER_STAGE_S = 0.041
"""LLaMA-30B, batch 32, on three GPUs: what a hop carries, and what a stage computes for it."""
LEAST_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Wire:
    """What lies between two hosts: its ratio (0: no limit) and its round trip."""

    ratio: float
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class Environment:
    """A network between `client` and the stages: one wire for each pair of them.

    `pairs` are places in the order (client, stage 0, stage 1, ...).
    """

    name: str
    pairs: tuple[tuple[int, int, Wire], ...]

    def wire(self, one: int, other: int) -> Wire:
        """What lies between two places. Raises KeyError when nothing does."""
        ends = {one, other}
        for first, second, wire in self.pairs:
            if {first, second} == ends:
                return wire
        raise KeyError(f"{self.name} has nothing between {one} and {other}")

    @property
    def hops(self) -> list[Wire]:
        """From stage to stage, and from the last one back to the first."""
        last = max(other for _, other, _ in self.pairs)
        ends = [*range(1, last + 1), 1]
        return [self.wire(one, other) for one, other in zip(ends, ends[1:], strict=False)]

    @property
    def slowest(self) -> float:
        """The greatest ratio of a hop that carries rows."""
        return max(wire.ratio for wire in self.hops[:-1])


def uniform(name: str, ratio: float, rtt_ms: float, stages: int) -> Environment:
    """All pairs alike."""
    places = range(stages + 1)
    pairs = [(a, b, Wire(ratio, rtt_ms)) for a in places for b in places if a < b]
    return Environment(f"{name}, RTT {rtt_ms:g} ms", tuple(pairs))


def of_network(name: str, network: NetworkFile) -> Environment:
    """A network file's pairs, client first; rates as they are beside the paper's devices.

    Round trips stay: the paced stages here take about as long as those of the paper.
    """
    hosts = network.host_names
    pairs = list[tuple[int, int, Wire]]()
    for one, source in enumerate(hosts):
        for other in range(one + 1, len(hosts)):
            path = network.path(source, hosts[other])
            mbps = path.mbps or 0.0
            pairs.append((one, other, Wire(paper_ratio(mbps), 2 * path.one_way_ms)))
    return Environment(name, tuple(pairs))


def paper_ratio(mbps: float) -> float:
    """The ratio of a rate beside the paper's model and devices; 0 is no limit."""
    return PAPER_HOP_BYTES * 8 / (mbps * 1e6) / PAPER_STAGE_S if mbps else 0.0


def rate_mbps(ratio: float, hop_bytes: int, stage_s: float) -> float | None:
    """The rate at which `hop_bytes` take `ratio` times `stage_s`; None: no limit."""
    return None if ratio == 0 else hop_bytes * 8 / (ratio * stage_s) / 1e6


def step_s(environment: Environment, stage_s: float, stages: int) -> float:
    """How long one token of the whole batch takes, raw, without micro-batches."""
    *rows, _ = environment.hops
    wires_s = sum(wire.ratio * stage_s for wire in rows)
    delays_s = sum(wire.rtt_ms / 2e3 for wire in environment.hops)
    return stages * stage_s + wires_s + delays_s


def tokens_for(budget_s: float, one_step_s: float, most: int) -> int:
    """How many tokens a row gets, so that the slowest setting takes about `budget_s`."""
    return max(min(LEAST_TOKENS, most), min(most, round(budget_s / one_step_s)))


def chosen(names: Sequence[str], rtts_ms: Sequence[float], sites: NetworkFile) -> list[Environment]:
    """The environments of the paper of these names: all round trips of each, but for E6."""
    stages = len(sites.host_names) - 1
    found = [
        uniform(name, PAPER_RATIOS[name], rtt_ms, stages)
        for rtt_ms in rtts_ms
        for name in names
        if name in PAPER_RATIOS
    ]
    return [*found, of_network("E6, three sites", sites)] if "E6" in names else found
