"""Nothing grows: descriptors, threads, tasks and memory after many sessions and steps."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
import uvloop

from bloombee.errors import TransportError
from bloombee.protocol import link_estimate
from bloombee.server import exposure, recent_load
from bloombee.server.stage import StageParts, StageServer
from bloombee.swarm.identity import Identity
from bloombee.transport import certificates
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.fallback import FallbackDialer
from bloombee.transport.interface import Endpoint, Stream, TransportLimits
from tests.counting_pool import AddingModel, CountingPool
from tests.swarm.harness import (
    TWO,
    RawClient,
    RawSession,
    StageSetup,
    Swarm,
    counting_rows,
    counting_stage,
    kv_freed,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bloombee.transport.memory import MemoryDialer, MemoryNetwork

LIMITS = TransportLimits(linger_s=0.2, idle_s=0.2)
SETTLING_S = 5.0
ORPHANED_S = 1.2
"""By when a server has given up a session whose client left without a word."""


@pytest.fixture(autouse=True)
def short_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for seconds, or of so many passes, fills up at once: else it looks grown."""
    monkeypatch.setattr(link_estimate, "WINDOW_US", 100_000)
    monkeypatch.setattr(exposure, "MOST_PASSES", 8)
    monkeypatch.setattr(recent_load, "WINDOW_US", 1_000)


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    descriptors: int
    threads: int
    tasks: int
    objects: int
    blocks: int
    resident_kib: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        process = psutil.Process()
        return cls(
            descriptors=process.num_fds(),
            threads=threading.active_count(),
            tasks=len(asyncio.all_tasks()),
            objects=len(gc.get_objects()),
            blocks=sys.getallocatedblocks(),
            resident_kib=process.memory_info().rss >> 10,
        )

    def within(self, allowed: Footprint, before: Footprint) -> bool:
        """Whether it has grown since `before` by no more than `allowed`."""
        return all(
            getattr(self, name) <= getattr(before, name) + getattr(allowed, name)
            for name in (field.name for field in fields(self))
        )


ALLOWED = Footprint(
    descriptors=0, threads=0, tasks=0, objects=100, blocks=800, resident_kib=8 << 10
)
"""For caches of Python and the test's own objects; one object kept a step is over a thousand."""


async def stays_flat(work: Callable[[int], Awaitable[None]], warm_up: int, times: int) -> None:
    """Do `work` some times, then many times, and compare."""
    for number in range(warm_up):
        await work(number)
    await asyncio.sleep(ORPHANED_S)
    gc.collect()
    gc.freeze()  # what is there by now is looked at no more, which takes most of the time
    try:
        for number in range(warm_up):
            await work(number)
        await asyncio.sleep(ORPHANED_S)
        before = Footprint.now()
        for number in range(times):
            await work(number)
        await settles(before)
    finally:
        gc.unfreeze()


async def settles(before: Footprint) -> None:
    """Streams linger for a moment after their end."""
    until_s = asyncio.get_running_loop().time() + SETTLING_S
    while not (now := Footprint.now()).within(ALLOWED, before):
        assert asyncio.get_running_loop().time() < until_s, f"{before} has become {now}"
        await asyncio.sleep(0.1)


def forgetful_stage() -> StageSetup:
    """A counting stage that keeps no record of what it was asked, and few books of sessions."""
    model, pool = AddingModel(), CountingPool(4000)
    model.batches = cast("Any", deque(maxlen=1))
    model.spans = cast("Any", deque(maxlen=1))
    pool.calls = cast("Any", deque(maxlen=1))
    setup = counting_stage()
    limits = replace(setup.limits, traced_sessions=4)
    return replace(setup, model=model, pool=pool, limits=limits)


@asynccontextmanager
async def direct_swarm(stages: int) -> AsyncIterator[Swarm]:
    """Counting stages that listen on 127.0.0.1."""
    running = Swarm(cast("MemoryNetwork", None))
    try:
        for _ in range(stages):
            setup = forgetful_stage()
            identity = Identity.load_or_create(None)
            certificate = certificates.create(identity.peer_id)
            stage = StageServer(
                StageParts(
                    identity=identity,
                    certificate_hash=certificate.hash,
                    listener=DirectListener("127.0.0.1", 0, certificate, LIMITS),
                    dialer=FallbackDialer(DirectDialer(LIMITS), DirectDialer(LIMITS)),
                    model=setup.model,
                    pool=setup.pool,
                    offer=setup.offer,
                    limits=setup.limits,
                )
            )
            await stage.start()
            running.stages.append(stage)
        yield running
    finally:
        for stage in running.stages:
            await stage.stop(2.0)


async def decode(session: RawSession, steps: int) -> None:
    await session.step(counting_rows(4), {0: (0, 4)}, want="last")
    for position in range(4, 4 + steps):
        await session.step(
            counting_rows(1), {0: (position, 1)}, phase="decode", answered=position - 4
        )


@pytest.mark.timeout(120)
def test_sessions_and_steps_leave_nothing() -> None:
    """Closed, left without a word, and by a client whose dialer goes."""

    async def main() -> None:
        async with direct_swarm(2) as swarm:
            dialer = DirectDialer(LIMITS)
            client = RawClient(Identity.load_or_create(None), cast("MemoryDialer", dialer))

            async def work(number: int) -> None:
                session = await client.open(swarm.route(*TWO))
                await decode(session, 8)
                await (session.vanish() if number % 3 == 2 else session.close())

            await stays_flat(work, 30, 150)
            await kv_freed(swarm, 4000, 4000)

            async def passing(_: int) -> None:
                other = DirectDialer(LIMITS)
                guest = RawClient(Identity.load_or_create(None), cast("MemoryDialer", other))
                session = await guest.open(swarm.route(*TWO))
                await decode(session, 2)
                await other.close()

            await stays_flat(passing, 6, 18)
            await kv_freed(swarm, 4000, 4000)

            async def long(_: int) -> None:
                session = await client.open(swarm.route(*TWO), max_length=450)
                await decode(session, 400)
                await session.close()

            await stays_flat(long, 1, 4)
            await dialer.close()

    uvloop.run(main())


@pytest.mark.timeout(60)
def test_dialers_keep_nothing_of_what_is_gone() -> None:
    """Servers come and go under new addresses; some addresses lead nowhere."""

    async def until_closed(stream: Stream) -> None:
        while await stream.receive() is not None:
            pass

    async def main() -> None:
        identity = Identity.load_or_create(None)
        certificate = certificates.create(identity.peer_id)
        dialer = FallbackDialer(DirectDialer(LIMITS), DirectDialer(LIMITS), retry_first_s=0.1)

        async def work(number: int) -> None:
            listener = DirectListener("127.0.0.1", 0, certificate, LIMITS)
            await listener.start(until_closed)
            stream = await dialer.dial(listener.endpoint, 5.0)
            await stream.send([b"word"])
            await listener.stop(0.0)
            nowhere = Endpoint(identity.peer_id, f"127.0.0.1:{1 + number}", certificate.hash)
            with pytest.raises(TransportError):
                await dialer.dial(nowhere, 5.0)

        await stays_flat(work, 10, 40)
        await dialer.close()

    uvloop.run(main())
