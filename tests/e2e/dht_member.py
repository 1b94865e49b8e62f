"""A process that publishes one server record until it is told to stop, or dies.

`python -m tests.e2e.dht_member READY_FILE LIFETIME_S REFRESH_S MADDR...`
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from bloombee.cli.serving import ReadyReport, run_until_stopped, write_ready_file
from bloombee.core import PeerId, Span
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.records import ServerRecord, ServerState

FINGERPRINT = "f" * 64
NUM_BLOCKS = 30


def record_of(peer: PeerId, start: int, end: int) -> ServerRecord:
    return ServerRecord(
        peer=peer,
        fingerprint=FINGERPRINT,
        model="tiny",
        num_blocks=NUM_BLOCKS,
        span=Span(start, end),
        addresses=("127.0.0.1:9",),
        certificate_hash=bytes(32),
        dtype="float32",
        kv_tokens=1000,
        max_length=512,
        throughput_tokens_per_s=10.0,
        version="test",
        state=ServerState.ONLINE,
    )


async def serve(ready: Path, lifetime_s: float, refresh_s: float, peers: tuple[str, ...]) -> None:
    identity = Identity.load_or_create(None)
    options = NodeOptions(initial_peers=peers, record_lifetime_s=lifetime_s, refresh_s=refresh_s)
    node = await SwarmNode.start(options, identity)
    try:
        await node.publish(record_of(identity.peer_id, 0, 10))
        write_ready_file(ready, ReadyReport(node.peer_id, node.maddrs, os.getpid()))
        await asyncio.Event().wait()
    finally:
        await node.close()


if __name__ == "__main__":
    file, lifetime, refresh, *maddrs = sys.argv[1:]
    sys.exit(
        run_until_stopped(
            "member", serve(Path(file), float(lifetime), float(refresh), tuple(maddrs))
        )
    )
