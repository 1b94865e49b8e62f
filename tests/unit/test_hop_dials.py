"""How long a stage waits for the next one to answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import DeadlineExceeded
from bloombee.server.hop_dials import LONGEST_S, MOST_ENDPOINTS, PATIENCE, SHORTEST_S, HopDials
from bloombee.swarm.connection import ConnectionSettings, accept
from bloombee.swarm.identity import Identity
from bloombee.transport.interface import Endpoint
from bloombee.transport.links import LinkShape
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import run

if TYPE_CHECKING:
    from bloombee.transport.interface import Stream

DEADLINE_S = 10.0
SETTINGS = ConnectionSettings(None, DEADLINE_S)


async def world(delay_s: float) -> tuple[MemoryNetwork, Endpoint, HopDials]:
    network, server = MemoryNetwork(link=LinkShape(delay_s=delay_s)), Identity.load_or_create(None)

    async def serve(stream: Stream) -> None:
        connection = await accept(stream, server, b"", settings=SETTINGS)
        await connection.receive(60.0)

    listener = network.listener(server.peer_id)
    await listener.start(serve)
    dials = HopDials(network.dialer("me"), Identity.load_or_create(None), SETTINGS)
    return network, listener.endpoint, dials


@pytest.mark.parametrize(
    ("delay_s", "expected_s"), [(0.001, SHORTEST_S), (0.05, 0.1 * PATIENCE), (0.4, LONGEST_S)]
)
def test_who_was_reached_before_has_less_time(delay_s: float, expected_s: float) -> None:
    async def main() -> None:
        network, endpoint, dials = await world(delay_s)
        await dials.dial(endpoint)
        network.cut("me", endpoint.peer)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await dials.dial(endpoint)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(expected_s, rel=0.01)
        network.mend("me", endpoint.peer)
        await dials.dial(endpoint)

    run(main())


def test_who_was_never_reached_has_all_of_it() -> None:
    async def main() -> None:
        network, endpoint, dials = await world(0.001)
        network.cut("me", endpoint.peer)
        with pytest.raises(DeadlineExceeded):
            await dials.dial(endpoint)
        assert asyncio.get_running_loop().time() == pytest.approx(DEADLINE_S)

    run(main())


def test_only_so_many_are_remembered() -> None:
    async def main() -> None:
        _, endpoint, dials = await world(0.001)
        dials._took_s = {Endpoint(f"peer{n}", "here"): 0.01 for n in range(MOST_ENDPOINTS)}
        await dials.dial(endpoint)
        assert len(dials._took_s) == MOST_ENDPOINTS
        assert dials.deadline_s(endpoint) == SHORTEST_S
        assert dials.deadline_s(Endpoint("peer0", "here")) == DEADLINE_S

    run(main())
