"""The nearest to a network that processes can play themselves, where nobody is root.

Each plays a line of its own (`--emulate-link`): the rates of its host, or of its slowest
path, and the mean of its delays. Loss, queues and what TCP makes of them are not played.
"""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from bloombee.cli.child import Place

if TYPE_CHECKING:
    from bloombee.config.networks import NetworkFile

NO_LIMIT_MBPS = 100_000.0


def line_at(network: NetworkFile, host: str) -> str:
    """What `--emulate-link` says in a host."""
    kind = network.kind_of(host)
    others = [other for other in network.host_names if other != host]
    away = [network.path(host, other) for other in others]
    back = [network.path(other, host) for other in others]
    up = min(rate for rate in (kind.up_mbps, *(p.mbps for p in away), NO_LIMIT_MBPS) if rate)
    down = min(rate for rate in (kind.down_mbps, *(p.mbps for p in back), NO_LIMIT_MBPS) if rate)
    rtt_ms = 2 * mean(path.one_way_ms for path in away) if away else 0.0
    return f"{up:.12g}/{down:.12g}:{rtt_ms:.6f}"


def place_at(network: NetworkFile, host: str) -> Place:
    """Where a server of that host runs: here, behind its line."""
    return Place(flags=("--emulate-link", line_at(network, host)))


def differs(network: NetworkFile) -> str:
    """What of the network is not played; empty when all that matters is."""
    paths = [
        network.path(one, other)
        for one in network.host_names
        for other in network.host_names
        if one != other
    ]
    found = {
        "loss": any(path.loss for path in paths),
        "unequal paths": len({(path.mbps, path.one_way_ms) for path in paths}) > 1,
    }
    return " and ".join(name for name, true in found.items() if true)
