"""The client's loop thread: results, errors, interrupts, notebooks, exit."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from bloombee.client.loop import LoopThread, shared_loop
from bloombee.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def loop():
    thread = LoopThread()
    yield thread
    thread.close()


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("no")

    assert loop.run(double(21)) == 42
    with pytest.raises(ValueError, match="no"):
        loop.run(fail())
    assert loop.run(double(1)) == 2


def test_it_works_inside_a_running_loop(loop: LoopThread) -> None:
    async def notebook_cell() -> int:
        return loop.run(double(4))

    assert asyncio.run(notebook_cell()) == 8


def test_many_threads_use_it_at_once(loop: LoopThread) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(loop.run(double(n)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(results) == [2 * n for n in range(8)]


def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_cleanup(loop: LoopThread) -> None:
    events: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            events.append("cleaned")

    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait_for_ever())
    assert events == ["cleaned"]
    assert loop.run(double(3)) == 6


def test_a_result_that_an_interrupt_kept_back_is_undone(loop: LoopThread) -> None:
    undone: list[int] = []

    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        return 0

    async def undo(result: int) -> None:
        undone.append(result)

    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(stubborn(), undo=undo)
    loop.run(double(1))
    assert undone == [7]


def test_waiting_for_itself_is_refused(loop: LoopThread) -> None:
    async def inner() -> int:
        return loop.run(double(1))

    with pytest.raises(RequestError, match="own loop"):
        loop.run(inner())


def test_a_closed_loop_refuses_and_close_cancels(loop: LoopThread) -> None:
    cancelled = threading.Event()

    async def stay() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    loop.post(stay())
    loop.run(double(1))
    loop.close()
    assert cancelled.wait(1)
    with pytest.raises(RequestError, match="closed"):
        loop.run(double(1))
    loop.post(double(1))


def test_a_call_that_the_close_overtakes_is_refused(loop: LoopThread) -> None:
    async def stay() -> None:
        await asyncio.Event().wait()

    threading.Timer(0.1, loop.close).start()
    with pytest.raises(RequestError, match="closed before"):
        loop.run(stay())


def test_the_process_shares_one_loop() -> None:
    assert shared_loop() is shared_loop()


def test_an_interpreter_with_pending_work_ends_at_once() -> None:
    program = (
        "import asyncio, time\n"
        "from bloombee.client.loop import shared_loop\n"
        "async def stay(): await asyncio.Event().wait()\n"
        "loop = shared_loop(); loop.post(stay()); print(loop.run(asyncio.sleep(0, 'ok')))\n"
        "print(time.time(), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    ended = time.time()
    said, at = done.stdout.split()
    assert (done.returncode, said, done.stderr) == (0, "ok", "")
    assert ended - float(at) < 5


def test_a_forked_child_is_refused_instead_of_waiting_for_ever() -> None:
    program = (
        "import asyncio, os, signal\n"
        "from bloombee.client.loop import shared_loop\n"
        "loop = shared_loop()\n"
        "if not os.fork():\n"
        "    signal.alarm(20)\n"
        "    try: loop.run(asyncio.sleep(0))\n"
        "    except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    loop.close()\n"
        "    os._exit(0)\n"
        "print(os.wait()[1], loop.run(asyncio.sleep(0, 'ok')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    refused, ended = done.stdout.splitlines()
    assert refused.startswith("RequestError ")
    assert "forked" in refused
    assert (ended, done.stderr) == ("0 ok", "")


def test_items_of_a_coroutine_come_one_by_one(loop: LoopThread) -> None:
    async def count(put: Callable[[int], None]) -> None:
        for number in range(5):
            put(number)
            await asyncio.sleep(0)

    async def fail(put: Callable[[int], None]) -> None:
        put(1)
        raise ValueError("no")

    assert list(loop.stream(count)) == [0, 1, 2, 3, 4]
    told: list[int] = []
    with pytest.raises(ValueError, match="no"):
        told.extend(each for each in loop.stream(fail))
    assert told == [1]


def test_who_leaves_a_stream_ends_its_coroutine_first(loop: LoopThread) -> None:
    ended: list[str] = []

    async def endless(put: Callable[[int], None]) -> None:
        try:
            while True:
                put(0)
                await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0.01)
            ended.append("cleaned up")

    items = loop.stream(endless)
    assert next(items) == 0
    items.close()
    assert ended == ["cleaned up"]


def test_what_is_begun_tells_when_it_has_ended(loop: LoopThread) -> None:
    async def wait() -> None:
        await asyncio.sleep(0 if quick else 100)

    for quick in (True, False):
        ended = threading.Event()
        begun = loop.begin(wait(), ended.set)
        if not quick:
            begun.cancel()
        assert ended.wait(5)
        if quick:
            begun.check()
        else:
            with pytest.raises(RequestError):
                begun.check()


def test_a_handoff_costs_little(loop: LoopThread) -> None:
    async def nothing() -> None:
        return

    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            loop.run(nothing())
        best = min(best, (time.perf_counter() - started) / 50)
    assert best < 0.002, f"{best * 1e6:.0f} us per call"
