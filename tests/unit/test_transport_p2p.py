"""Streams over two real libp2p daemons keep the transport's contract."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import uvloop

from bloombee.errors import AuthError, BloomBeeError, ProtocolError, RequestError, TransportError
from bloombee.swarm.connection import ConnectionSettings, accept, connect
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.transport.interface import Endpoint, Stream, TransportLimits
from bloombee.transport.p2p import P2PDialer, P2PListener

LIMITS = TransportLimits(max_frame_bytes=1 << 20, queue_bytes=1 << 16, linger_s=1.0)
Case = Callable[[P2PDialer, Endpoint, list[object]], Awaitable[None]]


@asynccontextmanager
async def nodes(keys: tuple[Identity, Identity]) -> AsyncIterator[tuple[SwarmNode, SwarmNode]]:
    """One that listens, and one that only asks, as clients do."""
    ours, theirs = keys
    server = await SwarmNode.start(NodeOptions(), theirs)
    try:
        options = NodeOptions(initial_peers=server.maddrs, client_mode=True)
        client = await SwarmNode.start(options, ours)
        try:
            yield server, client
        finally:
            await client.close()
    finally:
        await server.close()


async def served(stream: Stream, heard: list[object]) -> None:
    """Do what the first frame says."""
    match await stream.receive():
        case b"echo":
            while (frame := await stream.receive()) is not None:
                await stream.send([frame])
            heard.append("closed")
        case b"say and return":
            await stream.send([b"said"])
        case b"raise":
            raise ProtocolError("no")
        case b"listen":
            try:
                heard.append(await stream.receive())
            except BloomBeeError as error:
                heard.append(type(error))


async def frames_come_back(dialer: P2PDialer, endpoint: Endpoint, heard: list[object]) -> None:
    stream = await dialer.dial(endpoint, 5.0)
    await stream.send([b"echo"])
    for frame in (b"", b"x", bytes(70_000), bytes(1 << 20)):
        await stream.send([frame])
        assert await stream.receive() == frame
    with pytest.raises(RequestError):
        await stream.send([bytes((1 << 20) + 1)])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await stream.receive()
    await stream.send([b"last"])
    assert await stream.receive() == b"last"
    await stream.close()
    assert await stream.receive() is None
    await asyncio.sleep(0.1)
    assert heard == ["closed"]


async def the_end_comes_after_the_frames(
    dialer: P2PDialer, endpoint: Endpoint, heard: list[object]
) -> None:
    stream = await dialer.dial(endpoint, 5.0)
    await stream.send([b"say and return"])
    assert await stream.receive() == b"said"
    assert await stream.receive() is None
    with pytest.raises(TransportError):
        await stream.send([b"late"])


async def a_raising_handler_breaks_it(
    dialer: P2PDialer, endpoint: Endpoint, heard: list[object]
) -> None:
    stream = await dialer.dial(endpoint, 5.0)
    await stream.send([b"raise"])
    with pytest.raises(TransportError):
        await stream.receive()


async def a_closed_dialer_breaks_it(
    dialer: P2PDialer, endpoint: Endpoint, heard: list[object]
) -> None:
    stream = await dialer.dial(endpoint, 5.0)
    await stream.send([b"listen"])
    await asyncio.sleep(0.1)
    await dialer.close()
    await asyncio.sleep(0.2)
    assert heard == [TransportError]


async def nobody_is_refused(dialer: P2PDialer, endpoint: Endpoint, heard: list[object]) -> None:
    for peer in (Identity.load_or_create(None).peer_id, "no peer id", ""):
        with pytest.raises(TransportError, match="libp2p"):
            await dialer.dial(replace(endpoint, peer=peer), 5.0)


async def greet(server: SwarmNode, client: SwarmNode, keys: tuple[Identity, Identity]) -> None:
    """A hello is good for the certificate that the server's record names, and no other."""
    ours, theirs = keys
    accepted: list[object] = []

    async def serve(stream: Stream) -> None:
        try:
            connection = await accept(stream, theirs, b"right", settings=ConnectionSettings())
        except AuthError as error:
            accepted.append(type(error))
            raise
        accepted.append((connection.remote, stream.remote))
        await connection.close()

    listener = P2PListener(server.control, server.peer_id, LIMITS)
    await listener.start(serve)
    dialer = P2PDialer(client.control, LIMITS)
    for shown in (b"right", b"wrong"):
        endpoint = replace(listener.endpoint, certificate_hash=shown)
        connection = await connect(dialer, endpoint, ours, settings=ConnectionSettings())
        with suppress(AuthError):
            assert await connection.receive(5.0) is None
        await connection.close()
    assert accepted == [(client.peer_id, client.peer_id), AuthError]
    await dialer.close()
    await listener.stop(0.0)


CASES: tuple[Case, ...] = (
    frames_come_back,
    the_end_comes_after_the_frames,
    a_raising_handler_breaks_it,
    a_closed_dialer_breaks_it,
    nobody_is_refused,
)


def test_the_contract_over_libp2p() -> None:
    # One pair of daemons for all cases: starting them is what takes time.
    async def main() -> None:
        keys = Identity.load_or_create(None), Identity.load_or_create(None)
        async with nodes(keys) as (server, client):
            heard: list[object] = []
            listener = P2PListener(server.control, server.peer_id, LIMITS)
            await listener.start(lambda stream: served(stream, heard))
            for case in CASES:
                heard.clear()
                dialer = P2PDialer(client.control, LIMITS)
                async with asyncio.timeout(20.0):
                    await case(dialer, listener.endpoint, heard)
                await dialer.close()
            small = P2PListener(
                server.control, server.peer_id, replace(LIMITS, max_frame_bytes=1000)
            )
            await listener.stop(0.0)
            await small.start(lambda stream: served(stream, heard))
            dialer, heard[:] = P2PDialer(client.control, LIMITS), []
            stream = await dialer.dial(small.endpoint, 5.0)
            await stream.send([b"listen"])
            await stream.send([bytes(1001)])
            with pytest.raises(TransportError):
                await stream.receive()
            await asyncio.sleep(0.1)
            assert heard == [ProtocolError]
            await small.stop(0.0)
            # libp2p may assume the protocol that it knew the peer by: then reading fails.
            with pytest.raises(TransportError):
                await (await dialer.dial(small.endpoint, 5.0)).receive()
            await dialer.close()
            await greet(server, client, keys)

    # The loop that servers and clients run; the nodes have their own in threads.
    uvloop.run(main())
    gc.collect()
