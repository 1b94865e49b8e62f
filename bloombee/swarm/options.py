"""How a process takes part in the DHT, and what its libp2p daemon is told of that."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.errors import SettingsError
from bloombee.swarm.addresses import PeerAddress, announced_multiaddress, listen_multiaddress
from bloombee.swarm.daemon import DaemonOptions
from bloombee.swarm.dht import P2PD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bloombee.swarm.identity import Identity


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a process takes part in the DHT.

    `announce` is `HOST` or `HOST:PORT` as others see it. In `client_mode` the node
    asks but doesn't listen and stores nothing. A record expires
    `record_lifetime_s` after its last refresh. The libp2p daemon is asked every
    `probe_s` whether it still answers.
    """

    initial_peers: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    announce: str | None = None
    client_mode: bool = False
    record_lifetime_s: float = 30.0
    refresh_s: float = 10.0
    start_deadline_s: float = 40.0
    call_deadline_s: float = 10.0
    probe_s: float = 5.0


def daemon_options(
    options: NodeOptions, identity: Identity, peers: Iterable[PeerAddress], port: int
) -> DaemonOptions:
    """What the daemon of a node with these initial peers is told; `port` 0 is any free one.

    Raises SettingsError when the port is taken or the host can't be listened on.
    """
    listen, announce = None, None
    if not options.client_mode:
        listen = listen_multiaddress(options.host, port)
        if port or options.announce is not None:
            port = _claim_port(options.host, port)
            listen = listen_multiaddress(options.host, port)
        if options.announce is not None:
            announce = announced_multiaddress(options.announce, port)
    loopback = options.host in ("localhost", "::1") or options.host.startswith("127.")
    return DaemonOptions(
        binary=P2PD,
        listen=listen,
        announce=announce,
        private_key=identity.libp2p_private_key(),
        map_ports=listen is not None and not loopback,
        public=announce is not None,
        relays=() if options.client_mode else _relays(peers),
    )


def _relays(peers: Iterable[PeerAddress]) -> tuple[str, ...]:
    """The initial peers as relays; plain TCP only, since the daemon ends at what it can't read."""
    return tuple(
        f"{transport}/p2p/{peer.peer}"
        for peer in peers
        for transport in peer.transports
        if transport.count("/") == 4 and "/tcp/" in transport
    )


def _claim_port(host: str, port: int) -> int:
    """A port that is free now: `port`, or any when it is 0.

    The daemon would share a taken port with whoever listens there (libp2p sets
    SO_REUSEPORT), and each would get half of the other's connections. Raises
    SettingsError when it is taken or can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore TIME_WAIT
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(
                f"can't listen on {host} port {port}: {error.strerror}; "
                "take another host or DHT port (0 is a free one)"
            ) from error
        return int(probe.getsockname()[1])
