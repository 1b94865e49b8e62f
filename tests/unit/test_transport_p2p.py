"""Streams over two real libp2p daemons keep the transport's contract."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hivemind.p2p import P2P

from bloombee.errors import BloomBeeError, ProtocolError, RequestError, TransportError
from bloombee.swarm.identity import Identity
from bloombee.transport.interface import Endpoint, Stream, TransportLimits
from bloombee.transport.p2p import P2PDialer, P2PListener

LIMITS = TransportLimits(max_frame_bytes=1 << 20, queue_bytes=1 << 16, linger_s=1.0)
Case = Callable[[P2PDialer, Endpoint, list[object]], Awaitable[None]]


@asynccontextmanager
async def daemons() -> AsyncIterator[tuple[P2P, P2P]]:
    here = ["/ip4/127.0.0.1/tcp/0"]
    server = await P2P.create(host_maddrs=here)
    peers = await server.get_visible_maddrs()
    client = await P2P.create(host_maddrs=here, initial_peers=peers)
    try:
        yield server, client
    finally:
        await client.shutdown()
        await server.shutdown()


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


CASES: tuple[Case, ...] = (
    frames_come_back,
    the_end_comes_after_the_frames,
    a_raising_handler_breaks_it,
    a_closed_dialer_breaks_it,
    nobody_is_refused,
)


# hivemind leaves the socket of a refused dial to the garbage collector, which then complains.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
def test_the_contract_over_libp2p() -> None:
    # One pair of daemons for all cases: starting them is what takes time.
    async def main() -> None:
        async with daemons() as (server, client):
            heard: list[object] = []
            listener = P2PListener(server, LIMITS)
            await listener.start(lambda stream: served(stream, heard))
            for case in CASES:
                heard.clear()
                dialer = P2PDialer(client, LIMITS)
                async with asyncio.timeout(20.0):
                    await case(dialer, listener.endpoint, heard)
                await dialer.close()
            small = P2PListener(server, replace(LIMITS, max_frame_bytes=1000))
            await listener.stop(0.0)
            await small.start(lambda stream: served(stream, heard))
            dialer, heard[:] = P2PDialer(client, LIMITS), []
            stream = await dialer.dial(small.endpoint, 5.0)
            await stream.send([b"listen"])
            await stream.send([bytes(1001)])
            with pytest.raises(TransportError):
                await stream.receive()
            await asyncio.sleep(0.1)
            assert heard == [ProtocolError]
            await dialer.close()
            await small.stop(0.0)

    asyncio.run(main())
    gc.collect()
