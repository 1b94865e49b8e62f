"""Multiaddresses: the few forms that a user writes and reads.

/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...      where a peer of the swarm listens
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import base58

from bloombee.core import PeerId
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW..."
_ID_MULTIHASHES = (bytes.fromhex("0024"), bytes.fromhex("1220"))
"""Beginnings of a binary peer id: the key itself (Ed25519), or a SHA-256 of it."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and where to dial it: multiaddresses without the `/p2p/` part."""

    peer: PeerId
    transports: tuple[str, ...]


def parse_peers(texts: Iterable[str]) -> tuple[PeerAddress, ...]:
    """The peers that `texts` name, each with all its addresses, in order of first mention.

    Raises SettingsError for the first text that isn't a multiaddress of a peer.
    """
    found: dict[PeerId, list[str]] = {}
    for text in texts:
        transport, separator, peer = text.strip().rpartition("/p2p/")
        if not separator or not _is_peer_id(peer) or not _is_transport(transport):
            raise SettingsError(
                f"{text!r} is no multiaddress of a peer; write it as {EXAMPLE}, "
                "the way bloombee-dht and bloombee-server print it"
            )
        found.setdefault(PeerId(peer), []).append(transport)
    return tuple(PeerAddress(peer, tuple(transports)) for peer, transports in found.items())


def listen_multiaddress(host: str, port: int) -> str:
    """`/ip4/HOST/tcp/PORT` for an address to listen on; raises SettingsError for names."""
    try:
        version = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise SettingsError(
            f"can't listen on {host!r}: give an IP address, such as 0.0.0.0 for all of this machine"
        ) from None
    return f"/ip{version.version}/{version}/tcp/{port}"


def announced_multiaddress(announce: str, default_port: int) -> str:
    """The multiaddress for `HOST` or `HOST:PORT` as others see it; HOST may be a name."""
    host, port = split_host_port(announce, default_port)
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"


def split_host_port(text: str, default_port: int) -> tuple[str, int]:
    """`HOST`, `HOST:PORT`, `[IPV6]:PORT` or a bare IPv6 address, with a port in any case."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest.removeprefix(":") or default_port)
    if text.count(":") > 1:
        return text, default_port
    host, _, port = text.partition(":")
    return host, int(port or default_port)


def host_and_port(transport: str) -> tuple[str, int] | None:
    """Where a multiaddress of plain TCP leads; None for any other."""
    words = transport.split("/")
    if len(words) != 5 or words[3] != "tcp" or not _is_port(words[4]):
        return None
    return words[2], int(words[4])


def _is_peer_id(text: str) -> bool:
    try:
        raw = base58.b58decode(text)
    except ValueError:
        return False
    return raw.startswith(_ID_MULTIHASHES) and len(raw) == 2 + raw[1]


def _is_transport(text: str) -> bool:
    """Whether it looks like `/ip4/a/tcp/p`, `/dns/name/udp/p/quic-v1`, relayed or not."""
    words = text.split("/")
    if len(words) < 5 or words[0] or words[3] not in ("tcp", "udp") or not _is_port(words[4]):
        return False
    if words[1] in ("ip4", "ip6"):
        return _is_ip(words[2], int(words[1][2]))
    return words[1] in ("dns", "dns4", "dns6") and bool(words[2])


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False
