"""One suite over every transport: what `transport/interface.py` promises, they keep."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import (
    BloomBeeError,
    ProtocolError,
    TransportError,
)
from tests.transports import LIMITS, Serving, echo, hold, run

if TYPE_CHECKING:
    from bloombee.transport.interface import (
        Stream,
    )


def test_frames_arrive_whole_in_order_and_counted(serving: Serving) -> None:
    sizes = [0, 1, 2, 3, 100, 70_000, 1 << 20, 5]

    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            frames = [bytes([65 + index]) * size for index, size in enumerate(sizes)]

            async def send_all() -> None:
                for frame in frames:
                    half = len(frame) // 2
                    await stream.send([frame[:half], memoryview(frame)[half:], bytearray()])

            async with asyncio.TaskGroup() as group:
                group.create_task(send_all())
                for frame in frames:
                    assert await stream.receive() == frame
            counters = stream.counters
            assert (counters.frames_sent, counters.bytes_sent) == (len(sizes), sum(sizes))
            assert (counters.frames_received, counters.bytes_received) == (len(sizes), sum(sizes))

    run(main)


def test_a_sent_buffer_may_be_changed_at_once(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            buffer = bytearray(b"before")
            await stream.send([buffer])
            buffer[:] = b"after!"
            assert await stream.receive() == b"before"

    run(main)


def test_many_streams_of_one_dialer_do_not_mix(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):

            async def talk(name: int) -> None:
                stream = await dialer.dial(endpoint, 5.0)
                for count in range(20):
                    frame = f"{name}:{count}".encode()
                    await stream.send([frame])
                    assert await stream.receive() == frame
                await stream.close()

            async with asyncio.TaskGroup() as group:
                for name in range(8):
                    group.create_task(talk(name))

    run(main)


def test_a_slow_reader_holds_the_sender_back_and_gets_everything(serving: Serving) -> None:
    frame, count = bytes(1 << 16), 400  # 25 MB: more than all buffers on the way
    go, done = asyncio.Event(), asyncio.Event()
    received: list[int] = []

    async def slow(stream: Stream) -> None:
        await go.wait()
        while (got := await stream.receive()) is not None:
            received.append(len(got))
        done.set()

    async def main() -> None:
        async with serving(slow) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for _ in range(count):
                    await stream.send([frame])
                    sent += 1

            async with asyncio.TaskGroup() as group:
                group.create_task(send_all())
                await asyncio.sleep(0.5)
                stuck = sent
                await asyncio.sleep(0.2)
                assert stuck == sent < count
                go.set()
            await stream.close()
            await done.wait()
            assert received == [len(frame)] * count

    run(main)


def test_close_delivers_what_was_sent_then_none(serving: Serving) -> None:
    heard: list[bytes | None] = []
    ended = asyncio.Event()

    async def listen(stream: Stream) -> None:
        await asyncio.sleep(0.05)
        heard.extend([await stream.receive(), await stream.receive(), await stream.receive()])
        heard.append(await stream.receive())
        with pytest.raises(TransportError, match="closed"):
            await stream.send([b"too late"])
        ended.set()

    async def main() -> None:
        async with serving(listen) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"one"])
            await stream.send([b"two"])
            await stream.close()
            await stream.close()
            with pytest.raises(TransportError, match="closed"):
                await stream.send([b"three"])
            assert await stream.receive() is None
            await ended.wait()
            assert heard == [b"one", b"two", None, None]

    run(main)


def test_a_handler_that_returns_closes_the_stream_after_its_frames(serving: Serving) -> None:
    async def speak(stream: Stream) -> None:
        for number in range(50):
            await stream.send([b"%d" % number])

    async def main() -> None:
        async with serving(speak) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await asyncio.sleep(0.05)
            frames: list[bytes] = []
            while (frame := await stream.receive()) is not None:
                frames.append(frame)
            assert frames == [b"%d" % number for number in range(50)]
            assert await stream.receive() is None
            with pytest.raises(TransportError, match="closed"):
                await stream.send([b"late"])

    run(main)


def test_close_by_the_listener_ends_the_stream_while_its_handler_runs(serving: Serving) -> None:
    async def early(stream: Stream) -> None:
        await stream.send([b"bye"])
        await stream.close()
        assert await stream.receive() is None
        await asyncio.sleep(60.0)

    async def main() -> None:
        async with serving(early) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            assert await stream.receive() == b"bye"
            assert await stream.receive() is None

    run(main)


def test_close_wakes_our_own_receive_and_send(serving: Serving) -> None:
    async def main() -> None:
        async with serving(hold) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(stream.receive())
                await asyncio.sleep(0.05)
                await stream.close()
            assert reading.result() is None

            stuck = await dialer.dial(endpoint, 5.0)

            async def send_for_ever() -> None:
                while True:
                    await stuck.send([bytes(1 << 16)])

            async def expect_refusal() -> None:
                with pytest.raises(TransportError):
                    await send_for_ever()

            async with asyncio.TaskGroup() as group:
                group.create_task(expect_refusal())
                await asyncio.sleep(0.3)
                # The reader never reads: this lingers, then breaks the stream.
                started = asyncio.get_running_loop().time()
                await stuck.close()
                assert asyncio.get_running_loop().time() - started < LIMITS.linger_s + 1.0

    run(main)


@pytest.mark.parametrize("error", [TransportError("next hop is gone"), ProtocolError("nonsense")])
def test_a_handler_that_raises_breaks_the_stream(serving: Serving, error: BloomBeeError) -> None:
    async def fail(stream: Stream) -> None:
        await stream.receive()
        raise error

    async def main() -> None:
        async with serving(fail) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"go"])
            with pytest.raises(TransportError):
                await stream.receive()
            with pytest.raises(TransportError):
                await stream.send([b"more"])
            # Others are served on.
            assert await (await dialer.dial(endpoint, 5.0)).send([b"go"]) is None

    run(main)


def test_a_handler_that_raises_ends_a_sender_it_never_read(serving: Serving) -> None:
    async def fail(stream: Stream) -> None:
        await asyncio.sleep(0.3)
        raise ProtocolError("enough")

    async def main() -> None:
        async with serving(fail) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            with pytest.raises(TransportError):
                while True:
                    await stream.send([bytes(1 << 16)])

    run(main)


def test_a_handler_stuck_in_send_can_fail(serving: Serving) -> None:
    async def flood(stream: Stream) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    await stream.send([bytes(1 << 16)])
        raise ProtocolError("the reader sleeps")

    async def main() -> None:
        async with serving(flood) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await asyncio.sleep(0.6)
            with pytest.raises(TransportError):
                while await stream.receive() is not None:
                    pass

    run(main)


def test_a_dialer_that_closes_breaks_its_streams_for_the_listener(serving: Serving) -> None:
    outcome: list[BaseException | bytes | None] = []
    ended = asyncio.Event()

    async def listen(stream: Stream) -> None:
        try:
            outcome.append(await stream.receive())
            outcome.append(await stream.receive())
        except BloomBeeError as error:
            outcome.append(error)
        ended.set()

    async def main() -> None:
        async with serving(listen) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"hello"])
            await asyncio.sleep(0.1)
            await dialer.close()
            with pytest.raises(TransportError):
                await stream.receive()
            await ended.wait()
            assert outcome[0] == b"hello"
            assert isinstance(outcome[1], TransportError)
            with pytest.raises(TransportError, match="closed"):
                await dialer.dial(endpoint, 5.0)

    run(main)
