"""A process that plays a slow line: rates, delay, order, and streams that end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bloombee.config.lines import LineShape
from bloombee.errors import TransportError
from bloombee.transport.memory import MemoryNetwork
from bloombee.transport.shaped import ShapedDialer, ShapedLine, ShapedListener
from tests.virtual_time import run

if TYPE_CHECKING:
    from bloombee.transport.interface import Dialer, Endpoint, Stream

KB = 1000


def now() -> float:
    return asyncio.get_running_loop().time()


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send([frame])


async def shaped(client: LineShape, server: LineShape) -> tuple[Dialer, Endpoint]:
    """A dialer and an echo, each with a line of its own, over a network without delay."""
    network = MemoryNetwork()
    plain = network.listener("server")
    await ShapedListener(plain, ShapedLine(server)).start(echo)
    return ShapedDialer(network.dialer("client"), ShapedLine(client)), plain.endpoint


def test_a_frame_takes_its_time_up_and_half_a_round_trip() -> None:
    async def main() -> None:
        client, server = LineShape(100 * KB, 200 * KB, 0.05), LineShape(1000 * KB, 50 * KB, 0.02)
        dialer, endpoint = await shaped(client, server)
        stream = await dialer.dial(endpoint, 5.0)
        start = now()
        await stream.send([bytes(5 * KB), bytes(5 * KB)])
        assert now() == start
        assert await stream.receive() == bytes(10 * KB)
        assert now() - start == pytest.approx(0.1 + 0.05 + 0.01 + 0.02, abs=1e-3)
        await dialer.close()

    run(main())


def test_streams_share_the_line_and_keep_their_order() -> None:
    async def main() -> None:
        dialer, endpoint = await shaped(LineShape(100 * KB, 1e9), LineShape(1e9, 1e9))
        one, two = await dialer.dial(endpoint, 5.0), await dialer.dial(endpoint, 5.0)
        start = now()
        for number in range(3):
            await one.send([bytes([number]), bytes(10 * KB - 1)])
        await two.send([b"last"])
        got = [(await one.receive() or b"")[0] for _ in range(3)]
        assert got == [0, 1, 2]
        assert now() - start == pytest.approx(0.3, abs=1e-3)
        assert await two.receive() == b"last"
        await dialer.close()

    run(main())


def test_several_senders_share_the_line_down() -> None:
    line = ShapedLine(LineShape(1e9, 100 * KB))
    assert line.arrives(5.0, 10 * KB) == pytest.approx(5.0)
    assert line.arrives(5.0, 10 * KB) == pytest.approx(5.1)
    assert line.arrives(9.0, 10 * KB) == pytest.approx(9.0)


def test_a_cancelled_receive_loses_nothing() -> None:
    async def main() -> None:
        dialer, endpoint = await shaped(LineShape(1e9, 10 * KB), LineShape(1e9, 1e9))
        stream = await dialer.dial(endpoint, 5.0)
        for letter in (b"a", b"b"):
            await stream.send([letter * 10 * KB])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                assert await stream.receive() == b"a" * 10 * KB
                await stream.receive()
        assert await stream.receive() == b"b" * 10 * KB
        await dialer.close()

    run(main())


def test_what_was_sent_before_the_end_arrives_and_nothing_is_sent_after() -> None:
    async def main() -> None:
        got: list[bytes] = []
        ended = asyncio.Event()

        async def collect(stream: Stream) -> None:
            while (frame := await stream.receive()) is not None:
                got.append(frame)
            ended.set()

        network = MemoryNetwork()
        listener = network.listener("server")
        await listener.start(collect)
        dialer = ShapedDialer(network.dialer("client"), ShapedLine(LineShape(1e9, 1e9, 0.5)))
        stream = await dialer.dial(listener.endpoint, 5.0)
        for frame in (b"one", b"two"):
            await stream.send([frame])
        await stream.close()
        await ended.wait()
        assert got == [b"one", b"two"]
        with pytest.raises(TransportError, match="is closed"):
            await stream.send([b"three"])
        await dialer.close()

    run(main())


def test_a_sender_waits_while_much_is_under_way_and_learns_that_the_stream_broke() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        listener = network.listener("server")
        await listener.start(echo)
        dialer = ShapedDialer(network.dialer("client"), ShapedLine(LineShape(1000 * KB, 1e9)))
        stream = await dialer.dial(listener.endpoint, 5.0)
        start = now()
        for _ in range(6):
            await stream.send([bytes(1000 * KB)])
        assert now() - start == pytest.approx(1.0, abs=0.2)
        network.kill("server")
        with pytest.raises(TransportError):
            for _ in range(6):
                await stream.send([bytes(1000 * KB)])
        await dialer.close()

    run(main())


def test_a_line_is_written_as_rates_and_a_round_trip() -> None:
    assert LineShape.parse("20/100:40") == LineShape(2.5e6, 12.5e6, 0.02)
    assert LineShape.parse("0.5/8") == LineShape(62.5e3, 1e6)
    for wrong in ("20", "20/0", "0/20", "20/100:", "-1/3", "fast/slow"):
        with pytest.raises(ValueError, match="a line is written as UP/DOWN in Mbit/s"):
            LineShape.parse(wrong)
