"""A server of real parts, from its settings: join, place, load, serve, move, leave.

1. Join the DHT, so that what the swarm lacks is known. 2. Open the model (config
only) and work out memory. 3. Choose blocks and announce that they are coming.
4. Load them. 5. Listen, measure, and publish the record that makes clients come.
6. Serve until cancelled; now and again look whether other blocks would serve the swarm
better, and move there. 7. Drain: the record says that it is leaving, and clients
move their sessions. 8. Leave: the record goes, then sessions, then the DHT.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from bloombee.config.settings import ServerSettings
from bloombee.core import PeerId, Span
from bloombee.errors import BloomBeeError
from bloombee.planner.moves import MovePolicy
from bloombee.server.announcement import announced_name
from bloombee.server.assembly import Assembly, Credentials
from bloombee.server.background import in_background
from bloombee.server.hosting import Host
from bloombee.server.leaving import Membership
from bloombee.server.opened import Opened, open_model
from bloombee.server.placement import claim, place
from bloombee.server.rebalancing import Rebalancer, Rhythm
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.records import ServerRecord
from bloombee.transport.certificates import load_or_create

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server tells whoever started it, once it serves."""

    peer: PeerId
    maddrs: tuple[str, ...]
    endpoint: str
    span: Span
    model: str
    kv_tokens: int

    def __str__(self) -> str:
        return (
            f"serving blocks {self.span} of {self.model}, {self.endpoint}, KV of "
            f"{self.kv_tokens:,} tokens; join with --initial-peers {' '.join(self.maddrs)}"
        )


async def run_server(
    settings: ServerSettings, report: Callable[[Serving], None], *, swarm_key: bytes | None = None
) -> NoReturn:
    """Serve until cancelled, then drain; calls `report` once ready, and after each move.

    Raises SettingsError and ModelError for what the user can mend, SwarmError when
    the swarm can't be reached or the libp2p daemon ends.
    """
    identity = Identity.load_or_create(settings.identity)
    certificate = load_or_create(identity.peer_id, settings.identity)
    who = Credentials(identity, certificate, swarm_key)
    node = await SwarmNode.start(_node_options(settings), identity)
    async with Membership(node, settings.drain_s) as member:
        opened = await in_background(partial(open_model, settings))
        assembly = Assembly(settings, opened, who, node.control)
        span = await _choose(settings, opened, node)
        fixed = settings.blocks is not None or settings.new_swarm
        record = await claim(assembly.record(span), node, fixed=fixed)
        logger.info(
            "blocks %s of %s; %s",
            record.span,
            opened.source.name,
            assembly.settled(record.span).memory,
        )
        host = Host(
            member,
            node,
            assembly,
            drain_s=settings.drain_s,
            report=lambda online: report(_serving(node, online)),
        )
        await host.serve(record)
        raise await member.ended(_moving(settings, node, host))


def _moving(
    settings: ServerSettings, node: SwarmNode, host: Host
) -> Coroutine[Any, Any, BloomBeeError] | None:
    """What moves the server when that helps; nothing, where it is pinned."""
    record = host.record
    if record.pinned or len(record.span) == record.num_blocks:
        return None
    return Rebalancer(
        node,
        host,
        random.Random().random,
        policy=MovePolicy(gain=settings.move_gain),
        rhythm=Rhythm(every_s=settings.rebalance_s),
    ).run()


async def _choose(settings: ServerSettings, opened: Opened, node: SwarmNode) -> Span:
    """The blocks to serve, given what the swarm holds now."""
    num_blocks = opened.source.num_blocks
    snapshot = await node.snapshot(opened.fingerprint, num_blocks)
    return place(settings, opened.memory.blocks, num_blocks, snapshot)


def _serving(node: SwarmNode, online: ServerRecord) -> Serving:
    return Serving(
        peer=online.peer,
        maddrs=tuple(node.maddrs),
        endpoint=online.addresses[0],
        span=online.span,
        model=online.model,
        kv_tokens=online.kv_tokens,
    )


def _node_options(settings: ServerSettings) -> NodeOptions:
    return NodeOptions(
        initial_peers=settings.initial_peers,
        host=settings.host,
        port=settings.dht_port,
        announce=announced_name(settings.announce),
    )
