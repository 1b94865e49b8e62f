"""The fallback dialer over two emulated networks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bloombee.errors import AuthError, DeadlineExceeded, TransportError
from bloombee.transport.fallback import FallbackDialer
from bloombee.transport.interface import Endpoint, Stream
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import run


async def world() -> tuple[MemoryNetwork, MemoryNetwork, Endpoint, FallbackDialer]:
    """Both networks have the same peer at the same address; each says which it is."""
    direct, relayed = MemoryNetwork(), MemoryNetwork()
    for name, network in (("direct", direct), ("relayed", relayed)):

        async def say(stream: Stream, name: str = name) -> None:
            await stream.send([name.encode()])

        await network.listener("server", "here").start(say)
    dialer = FallbackDialer(direct.dialer("me"), relayed.dialer("me"), retry_first_s=60.0)
    return direct, relayed, Endpoint("server", "here"), dialer


async def way(dialer: FallbackDialer, endpoint: Endpoint) -> bytes | None:
    stream = await dialer.dial(endpoint, 10.0)
    return await stream.receive()


def test_direct_while_it_works_then_relayed_and_back_after_a_minute() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        direct, _, endpoint, dialer = await world()
        assert await way(dialer, endpoint) == b"direct"
        direct.partition(["me"], ["server"])
        start = loop.time()
        assert await way(dialer, endpoint) == b"relayed"
        assert loop.time() - start == pytest.approx(5.0)
        assert await way(dialer, endpoint) == b"relayed"
        assert loop.time() - start == pytest.approx(5.0)
        direct.heal()
        assert await way(dialer, endpoint) == b"relayed"
        await asyncio.sleep(61.0)
        assert await way(dialer, endpoint) == b"direct"
        await dialer.close()

    run(main())


def test_both_failures_are_told_and_the_deadline_covers_both() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        direct, relayed, endpoint, dialer = await world()
        for network in (direct, relayed):
            network.partition(["me"], ["server"])
        with pytest.raises(DeadlineExceeded, match="the direct way: here did not answer"):
            await dialer.dial(endpoint, 10.0)
        assert loop.time() == pytest.approx(10.0)
        with pytest.raises(TransportError, match="failed before"):
            await dialer.dial(endpoint, 1.0)

    run(main())


def test_a_wrong_peer_is_not_looked_for_elsewhere() -> None:
    async def main() -> None:
        _, _, endpoint, dialer = await world()
        with pytest.raises(AuthError):
            await dialer.dial(replace(endpoint, peer="other"), 10.0)

    run(main())
