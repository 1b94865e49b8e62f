"""Staying in contact with the swarm: whom to join it by, at the start and ever after.

The initial peers are met again whenever they drop out of the routing table, so that
parts of a swarm that lost each other find together. A node that has lost everyone also
tries the peers it met since: the first node of a swarm has no others.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bloombee.errors import SwarmError
from bloombee.swarm.addresses import host_and_port
from bloombee.swarm.joining import JoinDeadlines, check_clock, greet_quietly, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bloombee.swarm.addresses import PeerAddress
    from bloombee.swarm.dht import Dht

_MAX_MET = 20
_PROBE_S = 3.0
_PUT_OFF = "dial backoff"
"""What libp2p says when it doesn't try, since it failed before."""
_log = logging.getLogger(__name__)


class Contact:
    """Runs in the DHT's event loop. `initial` are the peers that the user named.

    `start_daemon_again` is called when nothing but the daemon's own patience keeps us out.
    """

    def __init__(
        self,
        initial: tuple[PeerAddress, ...],
        skew_limit_s: float,
        start_daemon_again: Callable[[str], None],
    ) -> None:
        self._initial = initial
        self._met: tuple[PeerAddress, ...] = ()
        self._skew_limit_s = skew_limit_s
        self._start_daemon_again = start_daemon_again
        self.clock_skew_s = 0.0

    async def join(self, dht: Dht) -> None:
        """Join by the initial peers, if there are any. Raises SwarmError as `joining` does."""
        if self._initial:
            await self._join_by(dht, self._initial)

    async def regain(self, dht: Dht) -> None:
        """Join again when `dht` knows nobody; a node without initial peers may stay alone.

        Raises SwarmError when no peer answers.
        """
        if dht.knows_peers:
            return
        named = {peer.peer for peer in self._initial}
        peers = (*self._initial, *(peer for peer in self._met if peer.peer not in named))
        # A dial that fails makes libp2p put off the next ones, for minutes in the end. So it is
        # only asked to dial where it can succeed.
        reachable = await _reachable(peers)
        try:
            if not reachable and peers:
                raise SwarmError(f"none of {len(peers)} known peers can be reached")
            if reachable:
                await self._join_by(dht, reachable)
        except SwarmError as error:
            if _PUT_OFF in str(error):
                self._start_daemon_again("it puts off dialing peers that can be reached")
            if self._initial:
                raise
            _log.debug("alone: %s", error)

    async def keep(self, dht: Dht) -> None:
        """Meet the initial peers that `dht` has lost, and remember whom it knows. Never raises."""
        dht.tidy()
        lost = [peer for peer in self._initial if not dht.knows(peer.peer)]
        await greet_quietly(dht, await _reachable(lost), JoinDeadlines().grace_s)
        if dht.knows_peers:
            self._met = await dht.neighbours(_MAX_MET) or self._met

    async def _join_by(self, dht: Dht, peers: tuple[PeerAddress, ...]) -> None:
        joined = await join(dht, peers, JoinDeadlines())
        self.clock_skew_s = check_clock(joined, self._skew_limit_s)
        if not any(entry.sees_us for entry in joined):
            _log.warning(
                "no initial peer can dial this node back: others reach it through relays, which "
                "is slower; to change that, open its DHT port in the firewall, or give the "
                "address others see with --announce"
            )


async def _reachable(peers: Iterable[PeerAddress]) -> tuple[PeerAddress, ...]:
    """Those that take a TCP connection now, or whose addresses don't tell."""
    asked = tuple(peers)
    found = await asyncio.gather(*(_is_reachable(peer) for peer in asked))
    return tuple(peer for peer, reachable in zip(asked, found, strict=True) if reachable)


async def _is_reachable(peer: PeerAddress) -> bool:
    targets = [host_and_port(transport) for transport in peer.transports]
    if None in targets:
        return True
    return any(await asyncio.gather(*(_takes_tcp(*target) for target in targets if target)))


async def _takes_tcp(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        _log.debug("no connection to %s port %d: %r", host, port, error)
        return False
    writer.transport.abort()
    return True
