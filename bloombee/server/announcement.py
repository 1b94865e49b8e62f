"""Under which host others reach this server's data port, when the user doesn't say."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from bloombee.swarm.addresses import split_host_port

ANY = ("0.0.0.0", "::", "")
LOOPBACK = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"
"""An address of the documentation range: asking for the way there sends nothing."""


def announced_host(host: str, initial_peers: Sequence[str]) -> str:
    """The host to announce for one that listens on `host`.

    One that listens on a single address announces that. One that listens on all
    announces loopback when all its initial peers are on loopback, else the address
    of the interface towards the first peer, or towards the internet.
    """
    if host not in ANY:
        return host
    targets = [target for peer in initial_peers if (target := _ip_of(peer)) is not None]
    if targets and all(ipaddress.ip_address(target).is_loopback for target in targets):
        return LOOPBACK
    outward = [target for target in targets if not ipaddress.ip_address(target).is_loopback]
    return _interface_towards(outward[0] if outward else _SOMEWHERE)


def announced_address(announce: str | None, host: str, port: int) -> str:
    """`host:port` for the record: `--announce` (`HOST` or `HOST:PORT`) wins over `host`."""
    return _join(host, port) if announce is None else _join(*split_host_port(announce, port))


def announced_name(announce: str | None) -> str | None:
    """The host of `--announce`, without its port, which is the data port's."""
    return None if announce is None else split_host_port(announce, 0)[0]


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ip_of(multiaddress: str) -> str | None:
    """The IP in `/ip4/IP/...` or `/ip6/IP/...`."""
    words = multiaddress.split("/")
    return words[2] if len(words) > 2 and words[1] in ("ip4", "ip6") else None


def _interface_towards(target: str) -> str:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
