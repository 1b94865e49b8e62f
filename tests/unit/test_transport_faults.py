"""The emulated network's faults beyond death: cuts, lost and repeated frames, ends from outside."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import TransportError
from bloombee.transport.links import Fate, LinkShape
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bloombee.transport.interface import Stream


class Sink:
    """A server that keeps what it receives, and the streams it serves."""

    def __init__(self, network: MemoryNetwork, peer: str = "server") -> None:
        self.listener = network.listener(peer)
        self.received: list[bytes] = []
        self.streams: list[Stream] = []
        self.endings: list[str] = []

    async def start(self) -> None:
        await self.listener.start(self._serve)

    async def _serve(self, stream: Stream) -> None:
        self.streams.append(stream)
        try:
            while (frame := await stream.receive()) is not None:
                self.received.append(frame)
        except TransportError as error:
            self.endings.append(str(error))
            raise
        self.endings.append("ended")


def scene(
    test: Callable[[MemoryNetwork, Sink, Stream], Awaitable[None]],
    seed: int = 0,
    shape: LinkShape | None = None,
) -> None:
    """Run `test` with a sink and a stream to it."""

    async def main() -> None:
        network = MemoryNetwork(seed, link=shape)
        sink = Sink(network)
        await sink.start()
        stream = await network.dialer("client").dial(sink.listener.endpoint, 5.0)
        await asyncio.sleep(0.1)  # the sink has taken it
        await test(network, sink, stream)

    run(main())


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def send_all(stream: Stream, frames: Sequence[bytes]) -> None:
    for frame in frames:
        await stream.send([frame])
    await asyncio.sleep(1.0)


def received_with(shape: LinkShape, seed: int, count: int) -> list[bytes]:
    got: list[bytes] = []

    async def test(_: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        await send_all(stream, numbered(count))
        got.extend(sink.received)

    scene(test, seed, shape)
    return got


def test_dropped_frames_vanish_and_the_stream_goes_on() -> None:
    got = received_with(LinkShape(drop=0.2), 1, 200)
    assert 120 < len(got) < 190
    assert got == sorted(got, key=int)
    assert len(set(got)) == len(got)
    assert got == received_with(LinkShape(drop=0.2), 1, 200)
    assert got != received_with(LinkShape(drop=0.2), 2, 200)


def test_repeated_frames_come_twice_in_their_place() -> None:
    got = received_with(LinkShape(repeat=0.2), 1, 200)
    assert got == sorted(got, key=int)
    assert set(got) == set(numbered(200))
    assert 10 < sum(count == 2 for count in Counter(got).values()) < 80


def test_swapped_frames_come_after_their_successor_and_none_is_lost() -> None:
    got = received_with(LinkShape(swap=0.2, delay_s=0.01), 1, 200)
    assert sorted(got, key=int) == numbered(200)
    late = sum(int(a) > int(b) for a, b in zip(got, got[1:], strict=False))
    assert 10 < late < 80


def test_a_frame_without_a_successor_is_only_late_and_comes_before_the_end() -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        network.observer = lambda source, target, frame: Fate.SWAP
        await stream.send([b"alone"])
        await asyncio.sleep(0.1)
        assert sink.received == []
        await asyncio.sleep(0.2)
        assert sink.received == [b"alone"]
        await stream.send([b"last"])
        await stream.close()
        await asyncio.sleep(0.1)
        assert sink.received == [b"alone", b"last"]
        assert sink.endings == ["ended"]

    scene(test)


def test_an_observer_sees_all_frames_and_decides_their_fate() -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        seen: list[tuple[str, str, bytes]] = []

        def observe(source: str, target: str, frame: bytes) -> Fate | None:
            seen.append((source, target, frame))
            return Fate.DROP if frame == b"1" else None

        network.observer = observe
        await send_all(stream, numbered(3))
        assert seen == [("client", "server", frame) for frame in numbered(3)]
        assert sink.received == [b"0", b"2"]

    scene(test)


@pytest.mark.parametrize("fate", [Fate.RESET, Fate.CLOSE])
def test_a_frame_can_take_its_stream_along(fate: Fate) -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        network.observer = lambda source, target, frame: fate if frame == b"1" else None
        await stream.send([b"0"])
        await stream.send([b"1"])
        await asyncio.sleep(0.1)
        if fate is Fate.RESET:
            with pytest.raises(TransportError, match="reset"):
                await stream.receive()
            assert "reset" in sink.endings[0]
        else:
            assert await stream.receive() is None
            assert sink.received == [b"0"]
            assert sink.endings == ["ended"]
        with pytest.raises(TransportError):
            await stream.send([b"2"])

    scene(test)


def test_streams_are_ended_and_reset_from_outside_one_by_one() -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        second = await network.dialer("client").dial(sink.listener.endpoint, 5.0)
        await asyncio.sleep(0.1)
        first, other = network.streams_between("client", "server")
        assert [first, other] == [stream, second]
        await stream.send([b"under way"])
        first.end()
        assert await stream.receive() is None
        await second.send([b"untouched"])
        await asyncio.sleep(0.1)
        assert set(sink.received) == {b"under way", b"untouched"}
        assert network.streams_between("client", "server") == [other]
        other.reset()
        with pytest.raises(TransportError, match="reset"):
            await second.receive()
        await asyncio.sleep(0.1)
        assert len(sink.endings) == 2

    scene(test)


def test_a_one_way_cut_leaves_the_other_way() -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        network.cut("client", "server")
        await send_all(stream, numbered(3))
        await sink.streams[0].send([b"hello"])
        assert await stream.receive() == b"hello"
        assert sink.received == []
        network.mend("client", "server")
        await asyncio.sleep(0.1)
        assert sink.received == numbered(3)

    scene(test)


def test_an_isolated_peer_neither_sends_nor_hears() -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        network.isolate("server", ["client", "server"])
        await stream.send([b"there"])
        await sink.streams[0].send([b"back"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await stream.receive()
        assert sink.received == []
        network.heal()
        assert await stream.receive() == b"back"
        await asyncio.sleep(0.1)
        assert sink.received == [b"there"]

    scene(test)


def test_who_is_cut_off_learns_of_a_death_when_the_link_is_mended() -> None:
    async def test(network: MemoryNetwork, sink: Sink, stream: Stream) -> None:
        await sink.streams[0].send([b"last words"])
        network.isolate("server", ["client"])
        network.kill("server")
        with pytest.raises(TransportError):
            await sink.streams[0].send([b"from the grave"])
        await stream.send([b"nobody hears"])
        assert await stream.receive() == b"last words"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await stream.receive()
        network.revive("server")
        network.heal()
        with pytest.raises(TransportError, match="server was reset"):
            await stream.receive()

    scene(test)
