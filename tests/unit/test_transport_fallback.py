"""Fallback dialer and listener over two emulated networks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import AuthError, DeadlineExceeded, Refused, TransportError
from bloombee.transport.fallback import FallbackDialer, FallbackListener
from bloombee.transport.interface import Endpoint, Stream, TransportLimits
from bloombee.transport.memory import MemoryDialer, MemoryNetwork
from tests.virtual_time import run

if TYPE_CHECKING:
    from bloombee.transport.memory_stream import MemoryStream


class ById(MemoryDialer):
    """Finds peers whatever their address, as libp2p does."""

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> MemoryStream:
        return await super().dial(replace(endpoint, address="here"), deadline_s)


async def world() -> tuple[MemoryNetwork, MemoryNetwork, Endpoint, FallbackDialer]:
    """Both networks have the same peer at the same address; each says which it is."""
    direct, relayed = MemoryNetwork(), MemoryNetwork()
    for name, network in (("direct", direct), ("relayed", relayed)):

        async def say(stream: Stream, name: str = name) -> None:
            await stream.send([name.encode()])

        await network.listener("server", "here").start(say)
    dialer = FallbackDialer(direct.dialer("me"), ById(relayed, "me", TransportLimits()))
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
        assert loop.time() - start == pytest.approx(3.0)
        assert await way(dialer, endpoint) == b"relayed"
        assert loop.time() - start == pytest.approx(3.0)
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
        direct.heal()
        assert await way(dialer, endpoint) == b"direct"

    run(main())


def test_a_way_that_fails_later_gives_the_direct_one_its_chance_again() -> None:
    async def main() -> None:
        direct, relayed, endpoint, dialer = await world()
        direct.partition(["me"], ["server"])
        assert await way(dialer, endpoint) == b"relayed"
        relayed.partition(["me"], ["server"])
        with pytest.raises(TransportError, match="the direct way: it failed before"):
            await dialer.dial(endpoint, 1.0)
        direct.heal()
        assert await way(dialer, endpoint) == b"direct"

    run(main())


def test_a_peer_without_an_address_is_not_dialed_directly() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        _, relayed, endpoint, dialer = await world()
        nowhere = replace(endpoint, address="")
        assert await way(dialer, nowhere) == b"relayed"
        assert await way(dialer, endpoint) == b"direct"
        relayed.partition(["me"], ["server"])
        started_s = loop.time()
        with pytest.raises(DeadlineExceeded, match="it gives no address"):
            await dialer.dial(nowhere, 10.0)
        assert loop.time() - started_s == pytest.approx(10.0)

    run(main())


class Shut(MemoryDialer):
    """Refuses whatever address is `shut`, as a host does where no process listens."""

    shut = False

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> MemoryStream:
        if self.shut:
            raise Refused(f"nobody listens at {endpoint.address}")
        return await super().dial(endpoint, deadline_s)


async def shut_world() -> tuple[Shut, Endpoint, FallbackDialer]:
    direct, relayed, endpoint, _ = await world()
    first = Shut(direct, "me", TransportLimits())
    return first, endpoint, FallbackDialer(first, ById(relayed, "me", TransportLimits()))


def test_who_ended_is_not_looked_for_at_once() -> None:
    async def main() -> None:
        first, endpoint, dialer = await shut_world()
        assert await way(dialer, endpoint) == b"direct"
        first.shut = True
        with pytest.raises(Refused, match="nobody listens"):
            await dialer.dial(endpoint, 10.0)
        assert await way(dialer, endpoint) == b"relayed"  # the next time it is

    run(main())


def test_an_address_that_never_answered_is_no_reason_to_give_up() -> None:
    async def main() -> None:
        first, endpoint, dialer = await shut_world()
        first.shut = True
        assert await way(dialer, endpoint) == b"relayed"

    run(main())


def test_that_no_direct_way_leads_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        direct, relayed, endpoint, dialer = await world()
        for network in (direct, relayed):
            network.partition(["me"], ["server"])
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await dialer.dial(endpoint, 1.0)
        direct.heal()
        assert await way(dialer, endpoint) == b"direct"
        direct.partition(["me"], ["server"])
        with pytest.raises(DeadlineExceeded):
            await dialer.dial(endpoint, 1.0)

    with caplog.at_level("INFO", "bloombee.transport.fallback"):
        run(main())
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "no direct way to server"
    ] * 2


def test_both_ways_lead_to_one_handler_until_it_stops() -> None:
    async def main() -> None:
        networks = MemoryNetwork(), MemoryNetwork()
        both = FallbackListener(*(network.listener("server", "here") for network in networks))
        served: list[Stream] = []

        async def serve(stream: Stream) -> None:
            served.append(stream)
            await stream.send([b"hello"])

        await both.start(serve)
        assert both.address == "here"
        dialers = [network.dialer("me") for network in networks]
        for count, dialer in enumerate(dialers, 1):
            assert await (await dialer.dial(Endpoint("server", "here"), 1.0)).receive() == b"hello"
            assert len(served) == count
        await both.stop(0.0)
        for dialer in dialers:
            with pytest.raises(TransportError):
                await dialer.dial(Endpoint("server", "here"), 1.0)

    run(main())


def test_a_wrong_peer_is_not_looked_for_elsewhere() -> None:
    async def main() -> None:
        _, _, endpoint, dialer = await world()
        with pytest.raises(AuthError):
            await dialer.dial(replace(endpoint, peer="other"), 10.0)

    run(main())
