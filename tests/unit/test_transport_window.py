"""Keep-alives: when they go, when they rest, and that nobody above sees them."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from bloombee.transport.interface import KEEP_ALIVE, TransportLimits
from bloombee.transport.pumped import PumpedStream
from bloombee.transport.window import WindowKeeper
from tests.virtual_time import run

LIMITS = TransportLimits()
BIG = bytes(LIMITS.keepalive_from_bytes)


@dataclass
class FakeWire:
    """Notes what is written and when; reads what the test puts."""

    remote: str = "far"
    written: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    arriving: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue[bytes | None])

    async def read(self) -> bytes | None:
        return await self.arriving.get()

    async def write(self, frame: bytes) -> None:
        self.written.append((asyncio.get_running_loop().time(), frame))

    async def finish(self) -> None:
        self.arriving.put_nowait(None)

    def cancel(self) -> None:
        self.arriving.put_nowait(None)

    def keep_alives(self) -> list[float]:
        return [when for when, frame in self.written if frame == KEEP_ALIVE]


def start(
    group: asyncio.TaskGroup, keeper: WindowKeeper, connection: str = "c"
) -> tuple[PumpedStream, FakeWire]:
    wire = FakeWire()
    stream = PumpedStream(wire, keeper.window(connection), LIMITS)
    group.create_task(stream.pump_in())
    group.create_task(stream.pump_out())
    return stream, wire


def test_a_byte_at_least_every_interval_until_ten_seconds_after_the_last_frame() -> None:
    async def main() -> None:
        keeper = WindowKeeper(LIMITS)
        async with asyncio.TaskGroup() as group:
            stream, wire = start(group, keeper)
            await stream.send([BIG])
            await asyncio.sleep(30.0)
            times = [when for when, _ in wire.written]
            gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
            assert max(gaps) <= LIMITS.keepalive_s + 1e-9
            assert min(gaps) >= LIMITS.keepalive_s / 2 - 1e-9
            assert 9.9 <= times[-1] <= 10.1
            assert stream.counters.frames_sent == 1
            # Small frames later need no window.
            await stream.send([b"small"])
            before = len(wire.written)
            await asyncio.sleep(5.0)
            assert len(wire.written) <= before + 1
            await stream.close()

    run(main())


def test_none_while_frames_flow_and_small_frames_prolong() -> None:
    async def main() -> None:
        keeper = WindowKeeper(LIMITS)
        async with asyncio.TaskGroup() as group:
            stream, wire = start(group, keeper)
            await stream.send([BIG])
            for _ in range(400):
                await stream.send([b"decode"])
                await asyncio.sleep(0.03)
            assert wire.keep_alives() == []
            await asyncio.sleep(9.0)
            assert wire.keep_alives()[-1] > 20.5
            await stream.close()

    run(main())


def test_none_for_those_who_send_only_small_frames() -> None:
    async def main() -> None:
        keeper = WindowKeeper(LIMITS)
        async with asyncio.TaskGroup() as group:
            stream, wire = start(group, keeper)
            await stream.send([b"small"])
            await asyncio.sleep(5.0)
            assert wire.keep_alives() == []
            await stream.close()

    run(main())


def test_one_stream_of_a_connection_keeps_it_for_all_also_after_another_closed() -> None:
    async def main() -> None:
        keeper = WindowKeeper(LIMITS)
        async with asyncio.TaskGroup() as group:
            one, first = start(group, keeper)
            two, second = start(group, keeper)
            _, elsewhere = start(group, keeper, "another connection")
            await one.send([BIG])
            await two.send([b"small"])
            await asyncio.sleep(1.0)
            count = len(first.keep_alives()) + len(second.keep_alives())
            assert 9 <= count <= 21
            await two.close()
            await asyncio.sleep(1.0)
            assert len(first.keep_alives()) >= 9
            assert elsewhere.keep_alives() == []
            await one.close()
            await asyncio.sleep(1.0)
            elsewhere.arriving.put_nowait(None)
        keeper.close()

    run(main())


def test_received_keep_alives_are_swallowed() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            stream, wire = start(group, WindowKeeper(LIMITS))
            for frame in (KEEP_ALIVE, b"one", KEEP_ALIVE, KEEP_ALIVE, b"two"):
                wire.arriving.put_nowait(frame)
            assert [await stream.receive(), await stream.receive()] == [b"one", b"two"]
            assert stream.counters.frames_received == 2
            await stream.close()

    run(main())
