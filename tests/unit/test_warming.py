"""Ways that are kept short: what is dialed, how often, and what becomes of failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import TransportError
from bloombee.swarm.connection import Connection, ConnectionSettings, accept, connect
from bloombee.swarm.identity import Identity
from bloombee.swarm.warming import COLD_S, MOST_WAYS, WARM_S, Warmer
from bloombee.transport.interface import Endpoint
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import run

if TYPE_CHECKING:
    from bloombee.transport.interface import Stream


class Ways:
    """A `connect` to one server that counts, and fails while it is `broken`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.dialed_s: list[float] = []
        self.broken = False
        self._dialer = network.dialer("me")
        self._identity = Identity.load_or_create(None)

    async def connect(self, endpoint: Endpoint) -> Connection:
        self.dialed_s.append(asyncio.get_running_loop().time())
        if self.broken:
            raise TransportError("no way")
        return await connect(
            self._dialer, endpoint, self._identity, settings=ConnectionSettings(None, 5.0)
        )


async def world() -> tuple[Ways, Endpoint, list[object]]:
    """A server, the ways to it, and what was asked of it: None where a stream just ended."""
    network, server = MemoryNetwork(), Identity.load_or_create(None)
    asked: list[object] = []

    async def serve(stream: Stream) -> None:
        connection = await accept(stream, server, b"", settings=ConnectionSettings(None, 5.0))
        asked.append(await connection.receive(5.0))

    listener = network.listener(server.peer_id)
    await listener.start(serve)
    return Ways(network), listener.endpoint, asked


def test_a_way_is_opened_once_in_a_while_and_nothing_is_asked() -> None:
    async def main() -> None:
        ways, endpoint, asked = await world()
        warmer = Warmer(ways.connect)
        for _ in range(int(2.5 * WARM_S)):
            assert await warmer.warm(endpoint)
            await asyncio.sleep(1.0)
        assert len(ways.dialed_s) == 3
        assert asked == [None] * 3

    run(main())


def test_who_cannot_be_reached_is_tried_less_and_less_often() -> None:
    async def main() -> None:
        ways, endpoint, _ = await world()
        warmer, ways.broken = Warmer(ways.connect), True
        for _ in range(1000):
            assert not await warmer.warm(endpoint)
            await asyncio.sleep(1.0)
        pauses = [b - a for a, b in zip(ways.dialed_s, ways.dialed_s[1:], strict=False)]
        assert pauses == pytest.approx(
            [min(COLD_S, WARM_S * 2**n) for n in range(len(pauses))], abs=1.0
        )
        ways.broken = False
        await asyncio.sleep(COLD_S)
        assert await warmer.warm(endpoint)

    run(main())


def test_what_was_cut_short_counts_for_nothing() -> None:
    async def main() -> None:
        ways, endpoint, _ = await world()
        stuck = asyncio.Event()

        async def hang(_: Endpoint) -> Connection:
            await stuck.wait()
            raise TransportError("never")

        warmer = Warmer(hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await warmer.warm(endpoint)
        warmer._connect = ways.connect
        assert await warmer.warm(endpoint)
        assert len(ways.dialed_s) == 1

    run(main())


def test_only_so_many_ways_are_kept() -> None:
    async def main() -> None:
        ways, endpoint, _ = await world()
        ways.broken = True
        warmer = Warmer(ways.connect)
        for number in range(MOST_WAYS + 5):
            assert not await warmer.warm(Endpoint(f"peer{number}", "here"))
        assert len(ways.dialed_s) == MOST_WAYS
        await asyncio.sleep(WARM_S)
        ways.broken = False
        assert await warmer.warm(endpoint)

    run(main())
