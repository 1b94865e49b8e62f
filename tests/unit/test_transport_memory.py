"""The emulated network in virtual time: delay, bandwidth, loss, death, partition."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import DeadlineExceeded, TransportError
from bloombee.transport.links import LinkShape
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import run

if TYPE_CHECKING:
    from bloombee.transport.interface import Endpoint, Stream


def now() -> float:
    return asyncio.get_running_loop().time()


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send([frame])


async def served(network: MemoryNetwork, peer: str = "server") -> Endpoint:
    listener = network.listener(peer)
    await listener.start(echo)
    return listener.endpoint


def test_delay_and_bandwidth_add_up_and_streams_share_the_link() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=LinkShape(delay_s=0.05, bytes_per_s=1e6))
        network.shape("server", "client", LinkShape(delay_s=0.05))
        endpoint = await served(network)
        dialer = network.dialer("client")
        one, two = await dialer.dial(endpoint, 5.0), await dialer.dial(endpoint, 5.0)
        start = now()
        assert start == pytest.approx(0.2)
        await one.send([bytes(100_000)])
        await two.send([bytes(100_000)])
        assert now() == start
        await one.receive()
        assert now() - start == pytest.approx(0.2)  # 0.1 on the wire, 0.1 there and back
        await two.receive()
        assert now() - start == pytest.approx(0.3)  # the second waited for the first

    run(main())


def test_jitter_keeps_the_order_and_the_seed_decides_it() -> None:
    async def arrivals(seed: int) -> list[float]:
        network = MemoryNetwork(seed, link=LinkShape(delay_s=0.01, jitter_s=0.1))
        stream = await network.dialer("client").dial(await served(network), 5.0)
        start, times = now(), list[float]()
        for number in range(20):
            await stream.send([b"%d" % number])
        for number in range(20):
            assert await stream.receive() == b"%d" % number
            times.append(now() - start)
        return times

    first, again, other = (run(arrivals(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == first
    assert first[-1] < 0.3


def test_loss_breaks_the_stream_at_the_frame_the_seed_chooses() -> None:
    async def frames_until_broken(seed: int) -> int:
        network = MemoryNetwork(seed, link=LinkShape(loss=0.02))
        stream = await network.dialer("client").dial(await served(network), 5.0)
        with pytest.raises(TransportError, match="reset"):
            for _ in itertools.count():
                await stream.send([b"frame"])
                await stream.receive()
        return stream.counters.frames_received

    counts = [run(frames_until_broken(seed)) for seed in range(20)]
    assert counts == [run(frames_until_broken(seed)) for seed in range(20)]
    assert len(set(counts)) > 5
    assert 5 < sum(counts) / len(counts) < 100  # two frames in a hundred, two ways: 25


def test_a_killed_peer_breaks_its_streams_and_no_others() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=LinkShape(delay_s=0.01))
        first, second = await served(network, "first"), await served(network, "second")
        dialer = network.dialer("client")
        doomed, safe = await dialer.dial(first, 5.0), await dialer.dial(second, 5.0)
        hop = await network.dialer("first").dial(second, 5.0)
        await doomed.send([b"in flight"])
        network.kill("first")
        for stream in (doomed, hop):
            with pytest.raises(TransportError, match="first was reset"):
                await stream.receive()
        with pytest.raises(TransportError, match="refused"):
            await dialer.dial(first, 5.0)
        with pytest.raises(TransportError):
            await network.dialer("first").dial(second, 5.0)
        await safe.send([b"hello"])
        assert await safe.receive() == b"hello"

        network.revive("first")
        again = await dialer.dial(await served(network, "first"), 5.0)
        await again.send([b"back"])
        assert await again.receive() == b"back"

    run(main())


def test_a_receiver_waiting_for_a_frame_hears_of_the_death_at_once() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=LinkShape(delay_s=10.0))
        stream = await network.dialer("client").dial(await served(network), 60.0)
        start = now()
        asyncio.get_running_loop().call_later(1.0, network.kill, "server")
        with pytest.raises(TransportError):
            await stream.receive()
        assert now() - start == pytest.approx(1.0)

    run(main())


def test_a_partition_delays_everything_until_it_heals_and_breaks_nothing() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=LinkShape(delay_s=0.01))
        endpoint, bystander = await served(network), await served(network, "bystander")
        dialer = network.dialer("client")
        stream = await dialer.dial(endpoint, 5.0)
        network.partition(["client"], ["server"])
        for number in range(5):
            await stream.send([b"%d" % number])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await stream.receive()
        with pytest.raises(DeadlineExceeded):
            await dialer.dial(endpoint, 2.0)
        other = await dialer.dial(bystander, 5.0)
        await other.send([b"hello"])
        assert await other.receive() == b"hello"
        network.heal()
        for number in range(5):
            assert await stream.receive() == b"%d" % number

    run(main())


def test_closing_a_stream_to_a_cut_off_peer_lingers_then_breaks_it() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        stream = await network.dialer("client").dial(await served(network), 5.0)
        network.partition(["client"], ["server"])
        await stream.send([b"lost"])
        start = now()
        await stream.close()
        assert now() - start == pytest.approx(network.limits.linger_s)

    run(main())


def test_back_pressure_counts_what_is_on_the_way() -> None:
    async def main() -> None:
        limits = replace(MemoryNetwork().limits, queue_bytes=1000)
        network = MemoryNetwork(link=LinkShape(delay_s=1.0), limits=limits)
        stream = await network.dialer("client").dial(await served(network), 5.0)
        start = now()
        for _ in range(2):
            await stream.send([bytes(600)])
        assert now() == start
        await stream.send([bytes(600)])
        # The first two were under way; one second until the reader took the first.
        assert now() - start == pytest.approx(1.0)

    run(main())


def test_an_injected_clock_drives_the_links() -> None:
    class HandClock:
        def __init__(self) -> None:
            self.now = 0.0
            self.due: list[tuple[float, object, tuple[object, ...]]] = []

        def time(self) -> float:
            return self.now

        def call_later(self, delay: float, callback: object, /, *args: object) -> None:
            self.due.append((self.now + delay, callback, args))

        def advance(self, seconds: float) -> None:
            self.now += seconds
            ready = [each for each in self.due if each[0] <= self.now]
            self.due = [each for each in self.due if each[0] > self.now]
            for _, callback, args in ready:
                assert callable(callback)
                callback(*args)

    async def main() -> None:
        clock = HandClock()
        network = MemoryNetwork(clock=clock)
        stream = await network.dialer("client").dial(await served(network), 5.0)
        network.shape("client", "server", LinkShape(delay_s=7.0))
        await stream.send([b"hello"])
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(stream.receive())
            await asyncio.sleep(0.01)
            clock.advance(6.9)
            await asyncio.sleep(0.01)
            assert not answer.done()
            clock.advance(0.2)
        assert answer.result() == b"hello"

    asyncio.run(main())
