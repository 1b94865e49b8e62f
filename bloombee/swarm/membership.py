"""One peer's membership in the swarm: daemon, DHT node, published record.

Everything here runs in the event loop of one thread; `node.SwarmNode` is its
face towards the other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bloombee.core import Span
from bloombee.errors import SettingsError, SwarmError
from bloombee.swarm.addresses import (
    PeerAddress,
    announced_multiaddress,
    listen_multiaddress,
    parse_peers,
)
from bloombee.swarm.daemon import Daemon, DaemonOptions
from bloombee.swarm.dht import P2PD, Dht
from bloombee.swarm.joining import JoinDeadlines, check_clock, join
from bloombee.swarm.keys import model_keys, span_keys
from bloombee.swarm.publisher import Publisher
from bloombee.swarm.records import (
    MAX_BLOCKS,
    ModelAnnouncement,
    ServerRecord,
    decode_model,
    decode_server,
)
from bloombee.swarm.view import SwarmSnapshot, assemble, elect_models

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from bloombee.swarm.identity import Identity

_MAX_MODELS = 64
"""Models looked up for an overview; the most announced come first."""
_CLOSE_STEP_S = 1.0
_MAX_DOUBLINGS = 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a process takes part in the DHT.

    `announce` is `HOST` or `HOST:PORT` as others see it. In `client_mode` the node
    asks but doesn't listen and stores nothing. A record expires
    `record_lifetime_s` after its last refresh.
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


class Membership:
    """Built by `start`; `run` must run beside the calls; ended by `close`."""

    def __init__(self, options: NodeOptions, identity: Identity, dht: Dht, daemon: Daemon) -> None:
        self._options = options
        self._dht = dht
        self._daemon = daemon
        self._publisher = Publisher(dht, identity, options.record_lifetime_s)
        self._peers: tuple[PeerAddress, ...] = ()
        self._closing = False
        self._undo = contextlib.AsyncExitStack()
        self._error: SwarmError | None = None
        self.addresses: tuple[str, ...] = ()
        self.clock_skew_s = 0.0
        self.control = daemon.control

    @classmethod
    async def start(cls, options: NodeOptions, identity: Identity) -> Self:
        """Start the daemon and join the swarm.

        Raises SettingsError for addresses, ports and identities that can't be used,
        SwarmError when no initial peer answers or the clock is too far off.
        """
        peers = _others(parse_peers(options.initial_peers), identity)
        daemon_options = _daemon_options(options, identity, peers)
        async with contextlib.AsyncExitStack() as undo:
            if identity.path is not None:
                undo.callback(os.close, _claim(identity.path))
            daemon = await Daemon.start(daemon_options)
            undo.callback(daemon.kill)
            dht = await Dht.start(daemon, client_mode=options.client_mode)
            member = cls(options, identity, dht, daemon)
            member._peers = peers
            await member._join()
            member.addresses = await dht.addresses()
            member._undo = undo.pop_all()
        return member

    async def _join(self) -> None:
        if not self._peers:
            return
        joined = await join(self._dht, self._peers, JoinDeadlines())
        self.clock_skew_s = check_clock(joined, self._options.record_lifetime_s / 2)
        if not any(entry.sees_us for entry in joined):
            _log.warning(
                "no initial peer can dial this node back: others reach it through relays, which "
                "is slower; to change that, open its DHT port in the firewall, or give the "
                "address others see with --announce"
            )

    async def run(self) -> SwarmError:
        """Refresh the record and rejoin when alone, until the daemon ends; returns why."""
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(self._tend())
            await self._daemon.ended()
            tending.cancel()
        self._error = SwarmError(
            f"the libp2p daemon (pid {self._daemon.pid}) ended: {self._daemon.last_words}; "
            "this process is no longer in the swarm, restart it"
        )
        if not self._closing:
            _log.error("%s", self._error)
        return self._error

    async def _tend(self) -> None:
        every_s = self._options.refresh_s
        failures = 0
        while True:
            await asyncio.sleep(min(every_s, 2.0**failures) if failures else every_s)
            try:
                async with asyncio.timeout(self._options.call_deadline_s):
                    await self._rejoin_if_alone()
                    await self._publisher.refresh()
            except (SwarmError, TimeoutError) as error:
                # One warning for an outage, however long.
                level = logging.DEBUG if failures else logging.WARNING
                failures = min(failures + 1, _MAX_DOUBLINGS)
                why = str(error) or "no answer in time"
                _log.log(level, "lost touch with the swarm, trying again: %s", why)
            else:
                if failures:
                    _log.warning("in touch with the swarm again")
                failures = 0

    async def _rejoin_if_alone(self) -> None:
        if not self._dht.knows_peers:
            await self._join()

    def publisher(self) -> Publisher:
        """To publish with. Raises SwarmError when the daemon is gone."""
        self.check_alive()
        return self._publisher

    def check_alive(self) -> None:
        """Raises SwarmError when the daemon is gone."""
        if self._error is not None:
            raise SwarmError(str(self._error))

    async def snapshot(self, fingerprint: str | None, num_blocks: int | None) -> SwarmSnapshot:
        """What the swarm holds now; see SwarmNode.snapshot."""
        self.check_alive()
        if self._options.client_mode:
            await self._rejoin_if_alone()
        announcements: list[ModelAnnouncement] = []
        if fingerprint is None or num_blocks is None:
            announcements = await self._announcements()
            models = [
                (entry.fingerprint, entry.num_blocks)
                for entry in elect_models(announcements)
                if fingerprint in (None, entry.fingerprint)
            ]
        else:
            models = [(fingerprint, num_blocks)]
        records = await self._records(models[:_MAX_MODELS])
        self.check_alive()
        return assemble(records, announcements, time.time())

    async def _announcements(self) -> list[ModelAnnouncement]:
        found = await self._dht.fetch(model_keys())
        now_s = time.time()
        decoded = (decode_model(value.owner, value.sealed, now_s) for value in found)
        return [announcement for announcement in decoded if announcement is not None]

    async def _records(self, models: Sequence[tuple[str, int]]) -> list[ServerRecord]:
        """The live records of these (fingerprint, block count), in all their copies."""
        found = await self._dht.fetch(_record_keys(models))
        now_s = time.time()
        wanted = {fingerprint for fingerprint, _ in models}
        decoded = (decode_server(value.owner, value.sealed, now_s) for value in found)
        return [record for record in decoded if record and record.fingerprint in wanted]

    async def close(self) -> None:
        """Withdraw what is published, leave, end the daemon; takes 4 s at most. Never raises."""
        self._closing = True
        if self._error is None:
            for work in (self._publisher.withdraw(), self._dht.close()):
                try:
                    async with asyncio.timeout(_CLOSE_STEP_S):
                        await work
                except (SwarmError, TimeoutError) as error:
                    _log.debug("while leaving the swarm: %r", error)
            await self._daemon.stop()
        await self._undo.aclose()


def _others(peers: Iterable[PeerAddress], identity: Identity) -> tuple[PeerAddress, ...]:
    return tuple(peer for peer in peers if peer.peer != identity.peer_id)


def _record_keys(models: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    return tuple(
        key
        for fingerprint, num_blocks in models
        for key in span_keys(fingerprint, Span(0, min(num_blocks, MAX_BLOCKS)))
    )


def _claim(path: Path) -> int:
    """Lock the identity file for this process; returns the descriptor that holds the lock."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SettingsError(
            f"identity file {path} is in use by another process; give each process its own"
        ) from None
    except OSError as error:  # some network file systems know no locks
        _log.debug("identity file %s can't be locked: %s", path, error)
    return descriptor


def _relays(peers: Iterable[PeerAddress]) -> tuple[str, ...]:
    """The initial peers as relays; plain TCP only, since the daemon ends at what it can't read."""
    return tuple(
        f"{transport}/p2p/{peer.peer}"
        for peer in peers
        for transport in peer.transports
        if transport.count("/") == 4 and "/tcp/" in transport
    )


def _daemon_options(
    options: NodeOptions, identity: Identity, peers: Iterable[PeerAddress]
) -> DaemonOptions:
    port, listen, announce = options.port, None, None
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
