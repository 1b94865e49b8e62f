"""What the switch is told: a network file as numbers, and the orders and answers after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from bloombee.config.networks import NetworkFile

UNLIMITED = float("inf")
LEAST_QUEUE_S = 0.1
QUEUE_BEYOND_RTT_S = 0.05


class Line(msgspec.Struct, frozen=True):
    """How a host hangs on the network: bytes a second up and down (infinite: no limit)."""

    up: float = UNLIMITED
    down: float = UNLIMITED


class Path(msgspec.Struct, frozen=True):
    """One direction between two hosts: bytes a second, delay, share of packets lost."""

    rate: float = UNLIMITED
    delay_s: float = 0.0
    loss: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """All of a network. `paths[source][target]`; `here` is who this process is, or -1.

    A queue holds `queue_s` of its rate, or `queue_bytes` if that is not zero.
    """

    names: tuple[str, ...]
    lines: tuple[Line, ...]
    paths: tuple[tuple[Path, ...], ...]
    mtu: int
    queue_s: float = LEAST_QUEUE_S
    queue_bytes: float = 0.0
    seed: int = 0
    here: int = -1

    @property
    def loses(self) -> bool:
        """Whether packets are lost at random."""
        return any(path.loss for row in self.paths for path in row)


def bytes_per_s(mbps: float | None) -> float:
    """A rate of a file as the switch counts; None is no limit."""
    return UNLIMITED if mbps is None else mbps * 1e6 / 8


def plan_of(network: NetworkFile, here: str = "") -> Plan:
    """The numbers of a network file.

    `here` names the host that this process is; without, it is one more host at
    the end, with neither limits nor delays. Raises SettingsError for an unknown `here`.
    """
    names = network.host_names
    if here:
        network.kind_of(here)
    kinds = [network.kind_of(name) for name in names]
    lines = [Line(bytes_per_s(kind.up_mbps), bytes_per_s(kind.down_mbps)) for kind in kinds]
    paths = [[_path(network, one, other) for other in names] for one in names]
    longest_s = max((one.delay_s * 2 for row in paths for one in row), default=0.0)
    if not here:
        lines.append(Line())
        paths = [[*row, Path()] for row in paths]
        paths.append([Path()] * len(lines))
    usual_s = max(LEAST_QUEUE_S, longest_s + QUEUE_BEYOND_RTT_S)
    return Plan(
        names=tuple(names) if here else (*names, "here"),
        lines=tuple(lines),
        paths=tuple(tuple(row) for row in paths),
        mtu=network.packet_bytes,
        queue_s=usual_s if network.queue_ms is None else network.queue_ms / 1e3,
        queue_bytes=(network.queue_kb or 0.0) * 1e3,
        seed=network.seed,
        here=names.index(here) if here else len(names),
    )


def _path(network: NetworkFile, source: str, target: str) -> Path:
    if source == target:
        return Path()
    found = network.path(source, target)
    return Path(bytes_per_s(found.mbps), found.one_way_ms / 1e3, found.loss)


# Orders ---------------------------------------------------------------------------------


class SetLine(msgspec.Struct, frozen=True, tag=True):
    """The host's rates from now on."""

    host: int
    line: Line


class SetPath(msgspec.Struct, frozen=True, tag=True):
    """The path of one direction from now on."""

    source: int
    target: int
    path: Path


class SetCut(msgspec.Struct, frozen=True, tag=True):
    """Whether all packets of one direction vanish."""

    source: int
    target: int
    cut: bool


class Read(msgspec.Struct, frozen=True, tag=True):
    """Ask for the counters."""


Order = Plan | SetLine | SetPath | SetCut | Read


# Answers --------------------------------------------------------------------------------


class Up(msgspec.Struct, frozen=True, tag=True):
    """The network stands: the switch's pid, its open namespaces, the third byte of addresses."""

    pid: int
    namespaces: tuple[int, ...]
    subnet: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """An order was carried out."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It was not, and why."""

    reason: str


class PairCount(msgspec.Struct, frozen=True):
    """One direction between two hosts: what was sent, and what of it never came.

    `bytes` are IP packets that the sender's line took; `dropped` by full queues,
    `lost` at random or because the pair was cut.
    """

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    lost: int = 0

    def __sub__(self, before: PairCount) -> PairCount:
        """What came since `before`."""
        return PairCount(
            self.packets - before.packets,
            self.bytes - before.bytes,
            self.dropped - before.dropped,
            self.lost - before.lost,
        )


class Counts(msgspec.Struct, frozen=True, tag=True):
    """All counters: pairs by (source, target), seconds the lines were busy, CPU of the switch.

    `late_s` is how long after their time packets left the switch, in all.
    """

    pairs: tuple[tuple[PairCount, ...], ...]
    up_busy_s: tuple[float, ...]
    down_busy_s: tuple[float, ...]
    cpu_s: float
    delivered: int
    late_s: float


Answer = Up | Done | Failed | Counts
