"""The loop that tests run in: time that jumps, processes that freeze, one order of events."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from bloombee.transport.links import LinkShape
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import VirtualTimeLoop, process, run

if TYPE_CHECKING:
    from bloombee.transport.interface import Stream


def loop() -> VirtualTimeLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualTimeLoop)
    return running


def test_hours_pass_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(7200.0)
        return loop().time()

    assert run(main()) == 7200.0


def test_waiting_for_ever_fails() -> None:
    with pytest.raises(RuntimeError, match="deadlock"):
        run(asyncio.Event().wait())


def test_a_frozen_process_does_nothing_and_then_everything_that_came_due() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []

        async def tick(name: str) -> None:
            for _ in range(4):
                await asyncio.sleep(1.0)
                log.append((name, loop().time()))

        async with asyncio.TaskGroup() as group:
            with process("frozen"):
                group.create_task(tick("frozen"))
            with process("other"):
                group.create_task(tick("other"))
            await asyncio.sleep(1.5)
            loop().freeze("frozen")
            await asyncio.sleep(8.5)
            loop().thaw("frozen")
        return log

    log = run(main())
    assert [t for name, t in log if name == "other"] == [1.0, 2.0, 3.0, 4.0]
    assert [t for name, t in log if name == "frozen"] == [1.0, 10.0, 11.0, 12.0]


def test_a_timeout_that_passed_while_frozen_strikes_at_the_thaw() -> None:
    async def main() -> float:
        async def wait() -> float:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.sleep(100.0)
            return loop().time()

        with process("frozen"):
            waiting = asyncio.get_running_loop().create_task(wait())
        await asyncio.sleep(0.5)
        loop().freeze("frozen")
        await asyncio.sleep(4.5)
        assert not waiting.done()
        loop().thaw("frozen")
        return await waiting

    assert run(main()) == 5.0


def test_what_is_sent_to_a_frozen_server_waits_and_dialing_it_works() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        seen: list[float] = []

        async def serve(stream: Stream) -> None:
            seen.append(loop().time())
            await asyncio.sleep(0)
            seen.append(loop().time())

        listener = network.listener("server")
        with process("server"):
            await listener.start(serve)
        loop().freeze("server")
        stream = await network.dialer("client").dial(listener.endpoint, 5.0)
        await stream.send([b"hello"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await stream.receive()
        assert seen == []
        loop().thaw("server")
        assert await stream.receive() is None
        assert seen == [60.0, 60.0]

    run(main())


def test_what_a_frozen_process_had_sent_before_still_arrives() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=LinkShape(delay_s=1.0))

        async def serve(stream: Stream) -> None:
            await stream.send([b"hello"])
            await stream.receive()

        listener = network.listener("server")
        with process("server"):
            await listener.start(serve)
        stream = await network.dialer("client").dial(listener.endpoint, 5.0)
        await asyncio.sleep(0.5)
        loop().freeze("server")
        assert await stream.receive() == b"hello"
        await stream.close()

    run(main())


def test_a_cancelled_callback_of_a_frozen_process_never_runs() -> None:
    async def main() -> None:
        ran: list[str] = []
        loop().freeze("frozen")
        with process("frozen"):
            soon = loop().call_soon(ran.append, "soon")
            later = loop().call_later(1.0, ran.append, "later")
            loop().call_later(1.0, ran.append, "kept")
        await asyncio.sleep(2.0)
        soon.cancel()
        later.cancel()
        loop().thaw("frozen")
        await asyncio.sleep(0)
        assert ran == ["kept"]

    run(main())


def test_a_task_group_cancels_in_the_order_of_creation() -> None:
    async def main() -> list[int]:
        cancelled: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(wait(number))
                await asyncio.sleep(0)
                raise ValueError
        return cancelled

    ballast = [object() for _ in range(random.Random(0).randrange(1000))]
    assert run(main()) == run(main())
    assert len(ballast) < 1000
