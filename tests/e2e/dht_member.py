"""A process that publishes one server record until it is told to stop, or dies.

`python -m tests.e2e.dht_member READY_FILE LIFETIME_S REFRESH_S HOST MADDR...`

It answers Describe at the address in its record, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bloombee.cli.serving import ReadyReport, run_until_stopped, write_ready_file
from bloombee.core import PeerId, Span
from bloombee.protocol.messages import Describe, Description
from bloombee.swarm.connection import ConnectionSettings, accept
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.transport import certificates
from bloombee.transport.direct import DirectListener

if TYPE_CHECKING:
    from bloombee.transport.interface import Stream

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


async def answer_describe(stream: Stream, identity: Identity, certificate_hash: bytes) -> None:
    connection = await accept(
        stream, identity, certificate_hash, settings=ConnectionSettings(deadline_s=5)
    )
    received = await connection.receive(5)
    assert received is not None and isinstance(received[0], Describe)
    await connection.send(
        Description(
            peer=identity.peer_id, version="test", model="tiny", fingerprint=FINGERPRINT,
            start=0, end=10, dtype="float32", device="cpu", kv_tokens=1000, free_tokens=321,
            sessions=2, steps=7, uptime_s=1.5, waiting=3, parked=1, prefix_bytes=2_500_000,
            prefix_hits=4, prefix_tokens_saved=1_024,
        )
    )  # fmt: skip
    await connection.receive(5)  # until the other side closes


async def serve(ready: Path, times_s: tuple[float, float], host: str, *peers: str) -> None:
    identity = Identity.load_or_create(None)
    certificate = certificates.create(identity.peer_id)
    listener = DirectListener(host, 0, certificate)
    await listener.start(lambda stream: answer_describe(stream, identity, certificate.hash))
    lifetime_s, refresh_s = times_s
    options = NodeOptions(
        initial_peers=peers, host=host, record_lifetime_s=lifetime_s, refresh_s=refresh_s
    )
    node = await SwarmNode.start(options, identity)
    try:
        record = replace(
            record_of(identity.peer_id, 0, 10),
            addresses=(listener.address,),
            certificate_hash=certificate.hash,
        )
        await node.publish(record)
        write_ready_file(ready, ReadyReport(node.peer_id, node.maddrs, os.getpid()))
        await asyncio.Event().wait()
    finally:
        await node.close()
        await listener.stop(0.1)


if __name__ == "__main__":
    file, lifetime, refresh, at, *maddrs = sys.argv[1:]
    times = float(lifetime), float(refresh)
    sys.exit(run_until_stopped("member", serve(Path(file), times, at, *maddrs)))
