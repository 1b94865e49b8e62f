"""hivemind's DHT node on our daemon: store and fetch sealed values, nothing else.

All of it runs in one event loop. hivemind's own `DHT` class forks a process for
this; a fork next to torch, gRPC and notebook threads is what we avoid.
"""

# hivemind ships no stubs; this is the only module of the package that touches it.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import hivemind.hivemind_cli
import msgspec
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from bloombee.core import PeerId
from bloombee.errors import SwarmError
from bloombee.swarm.addresses import PeerAddress
from bloombee.swarm.envelope import unseal
from bloombee.swarm.records import MAX_LIFETIME_S
from bloombee.transport.p2p_control import FAILURES, DaemonControl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.swarm.daemon import Daemon

P2PD = str(Path(hivemind.hivemind_cli.__file__).with_name("p2pd"))
RPC_DEADLINE_S = 3.0
_LOCAL_S = 1.0
"""For the daemon on this machine to answer."""
_log = logging.getLogger(__name__)
# A generated module, whose members no type checker sees.
_dht: Any = dht_pb2


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A sealed value and whose subkey it lay under (binary peer id)."""

    owner: bytes
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Greeting:
    """A peer's answer: how far its clock is ahead of ours, and whether it could dial back."""

    skew_s: float
    sees_us: bool


class OwnedValues(RecordValidatorBase):
    """Accepts only sealed values under their owner's subkey, with the expiry that is signed.

    hivemind asks it before it stores or believes anything, so a stranger can neither
    overwrite nor prolong what another peer said. hivemind's own validator lets
    values without an owner tag through; this one has no such case.
    """

    def validate(self, record: DHTRecord) -> bool:
        """Whether `record` may be stored or believed; never raises."""
        try:
            owner = msgspec.msgpack.decode(record.subkey, type=bytes)
            sealed = msgspec.msgpack.decode(record.value, type=bytes)
        except msgspec.MsgspecError:
            return False
        envelope = unseal(owner, sealed)
        return (
            envelope is not None
            and envelope.expires_at_s == record.expiration_time
            and envelope.expires_at_s < time.time() + MAX_LIFETIME_S
        )


class Dht:
    """One DHT node. Create, use and close it in the same event loop."""

    def __init__(
        self, p2p: P2P, node: DHTNode, control: DaemonControl, *, client_mode: bool
    ) -> None:
        self._p2p = p2p
        self._control = control
        self._node = node
        self._client_mode = client_mode

    @classmethod
    async def start(cls, daemon: Daemon, *, client_mode: bool, last: Self | None = None) -> Self:
        """A node on `daemon` that knows no peers yet.

        It takes the place of `last`, whose daemon is gone: under the same id, with what
        was stored there.
        """
        _quiet_hivemind()
        # hivemind names its sockets after a class attribute; ours go into the daemon's folder.
        attached = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{daemon.folder}/"})
        p2p: P2P = await attached.replicate(Multiaddr(f"/unix{daemon.control}"))
        node = await DHTNode.create(
            p2p=p2p,
            node_id=None if last is None else last._node.node_id,
            client_mode=client_mode,
            record_validator=OwnedValues(),
            wait_timeout=RPC_DEADLINE_S,
            # A cached record hides the newer one, and the withdrawal, for its lifetime.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            # By default the time for which a silent peer isn't asked doubles without end.
            backoff_rate=1.0,
        )
        if last is not None:
            node.protocol.storage = last._node.protocol.storage
        return cls(p2p, node, DaemonControl(daemon.control), client_mode=client_mode)

    @property
    def knows_peers(self) -> bool:
        """Whether any other node is left in the routing table."""
        return len(self._node.protocol.routing_table.uid_to_peer_id) > 0

    def forgive(self) -> bool:
        """Ask all peers again, also those that did not answer a moment ago; False if there's none.

        One that was only away while it started again is back sooner than it is asked.
        """
        banned = len(self._node.blacklist.banned_peers) > 0
        self._node.blacklist.clear()
        return banned

    def tidy(self) -> None:
        """Drop what hivemind keeps for ever: calls that their callers cancelled, peers' misses."""
        p2p: Any = self._p2p
        calls: dict[Any, asyncio.Task[Any]] = p2p._client.control._handler_tasks
        for call in [call for call, task in calls.items() if task.done()]:
            del calls[call]
        self._node.blacklist.ban_counter.clear()

    def knows(self, peer: PeerId) -> bool:
        """Whether `peer` is in the routing table."""
        return PeerID.from_base58(peer) in self._node.protocol.routing_table

    async def neighbours(self, limit: int) -> tuple[PeerAddress, ...]:
        """Up to `limit` nodes of the routing table and where they listen."""
        table = self._node.protocol.routing_table
        peers = [peer.to_base58() for peer in list(table.peer_id_to_uid)[-limit:]]
        found = await asyncio.gather(*(self._address(peer) for peer in peers))
        return tuple(address for address in found if address is not None)

    async def _address(self, peer: str) -> PeerAddress | None:
        try:
            async with asyncio.timeout(_LOCAL_S):
                transports = await self._control.addresses_of(peer)
        except FAILURES as error:
            _log.debug("the daemon knows no address of %s: %r", peer, error)
            return None
        return PeerAddress(PeerId(peer), transports) if transports else None

    async def cut(self, peer: PeerId) -> None:
        """Cut all connections to `peer`; the next call makes a new one. Never raises."""
        try:
            async with asyncio.timeout(_LOCAL_S):
                await self._control.disconnect(peer)
        except FAILURES as error:
            _log.debug("the connection to %s can't be cut: %r", peer, error)

    async def addresses(self) -> tuple[str, ...]:
        """The multiaddresses under which others can dial this node; none for a client."""
        if self._client_mode:
            return ()
        return tuple(str(address) for address in await self._p2p.get_visible_maddrs(latest=True))

    async def greet(self, peer: PeerAddress) -> Greeting:
        """Dial `peer`, take it into the routing table, and compare clocks.

        Raises what hivemind raises when it can't be reached or doesn't answer.
        """
        peer_id = PeerID.from_base58(peer.peer)
        await self._control.connect(peer.peer, peer.transports)
        protocol: Any = self._node.protocol
        request = _dht.PingRequest(peer=protocol.node_info, validate=not self._client_mode)
        asked_at = time.time()
        try:
            reply = await protocol.get_stub(peer_id).rpc_ping(request, timeout=RPC_DEADLINE_S)
        except TimeoutError:
            # After an outage a connection may seem to stand that carries nothing for minutes.
            await self.cut(peer.peer)
            raise
        skew_s = reply.dht_time - (asked_at + time.time()) / 2
        await protocol.update_routing_table(DHTID.from_bytes(reply.peer.node_id), peer_id)
        return Greeting(skew_s, sees_us=bool(reply.available) or self._client_mode)

    async def find_neighbours(self) -> None:
        """Fill the routing table from the peers that are in it."""
        await self._node.find_nearest_nodes([self._node.node_id])

    async def store(
        self, keys: Sequence[str], values: Sequence[bytes], owner: bytes, expires_at_s: float
    ) -> None:
        """Put one sealed value of `owner` under each key.

        Raises SwarmError when no node took any of them.
        """
        taken = await self._node.store_many(
            list(keys),
            list(values),
            expires_at_s,
            subkeys=[owner] * len(keys),
            exclude_self=self._client_mode,
        )
        if not any(taken.values()):
            raise SwarmError(
                "no DHT node took this peer's record; check the clock of this machine, and that "
                "no other process runs with the same identity"
            )

    async def fetch(self, keys: Sequence[str]) -> list[StoredValue]:
        """What lies under any of `keys`, merged from all nodes that hold them."""
        if not keys:
            return []
        found = await self._node.get_many(list(keys), sufficient_expiration_time=float("inf"))
        return [value for entry in found.values() for value in _values(entry)]

    async def close(self) -> None:
        """Stop answering; the daemon is stopped by whoever started it."""
        await self._node.shutdown()
        await self._p2p.shutdown()

    async def abandon(self) -> None:
        """Let go of a node whose daemon is gone. Never raises."""
        self._node.is_alive = False
        await self._p2p.shutdown()


def _values(entry: Any) -> tuple[StoredValue, ...]:
    if entry is None or not isinstance(entry.value, dict):
        return ()
    return tuple(
        StoredValue(owner, item.value)
        for owner, item in entry.value.items()
        if isinstance(owner, bytes) and isinstance(item.value, bytes)
    )


def _quiet_hivemind() -> None:
    """Give hivemind's messages to our loggers instead of its own handler, warnings only."""
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.WARNING)
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for everyone
