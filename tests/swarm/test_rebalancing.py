"""Ten servers that place themselves, over ten minutes of virtual time: they settle and stay.

Real stages, hosts and rebalancers; the noticeboard shows what was published only after a
second, to everybody but its author.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from bloombee.core import PeerId, Span
from bloombee.planner.moves import holders
from bloombee.server.executor import ExecutorSettings
from bloombee.server.hosting import Host
from bloombee.server.leaving import Membership
from bloombee.server.placement import claim
from bloombee.server.rebalancing import Rebalancer
from bloombee.server.stage import StageParts, StageServer
from bloombee.swarm.identity import Identity
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.swarm.view import SwarmSnapshot
from bloombee.transport.memory import MemoryNetwork
from tests import virtual_time
from tests.inline_executor import InlineExecutor
from tests.swarm.recovering import BLOCKS, digest_stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WIDTH, SERVERS = 2, 10
SEEN_S = 1.0
LOAD_S = 7.0


EPOCH_S = 1e6
"""Records are dated by a clock that did not begin with the test."""


def now_s() -> float:
    return asyncio.get_running_loop().time()


def wall_s() -> float:
    return EPOCH_S + now_s()


@dataclass
class World:
    """Who has said what, and when; and the servers that live."""

    said: list[tuple[float, ServerRecord]] = field(default_factory=list)
    gone: set[PeerId] = field(default_factory=set)
    servers: list[One] = field(default_factory=list)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    moves: list[tuple[float, Span, Span]] = field(default_factory=list)

    def seen_by(self, peer: PeerId | None) -> tuple[ServerRecord, ...]:
        limit_s = now_s() - SEEN_S
        latest = {r.peer: r for at, r in self.said if at <= limit_s or r.peer == peer}
        return tuple(record for who, record in latest.items() if who not in self.gone)

    def spread(self) -> list[int]:
        """How many hold the first third, the second, and the last."""
        counts = Counter(one.host.record.span for one in self.servers)
        return [counts[Span(start, start + WIDTH)] for start in range(0, BLOCKS, WIDTH)]

    async def join(self, group: asyncio.TaskGroup, speed: float = 50.0) -> None:
        one = One(self, speed, random.Random(len(self.servers)))
        self.servers.append(one)
        await one.begin(group)

    async def lose(self, span: Span) -> None:
        """One of the servers of these blocks vanishes."""
        one = next(each for each in self.servers if each.host.record.span == span)
        self.servers.remove(one)
        self.gone.add(one.peer)
        await one.end()


class One:
    """One server: noticeboard, maker and member of a world."""

    def __init__(self, world: World, speed: float, draw: random.Random) -> None:
        self.world = world
        self.speed = speed
        self.identity = Identity.load_or_create(None)
        self.peer = self.identity.peer_id
        self.member = Membership(cast("Any", self), 30.0)
        self.host = Host(self.member, self, cast("Any", self), drain_s=30.0, clock=wall_s)
        self.rebalancer = Rebalancer(self, self.host, draw.random)

    async def begin(self, group: asyncio.TaskGroup) -> None:
        setup = digest_stage(0, WIDTH)
        record = ServerRecord(
            peer=self.peer,
            fingerprint=setup.offer.fingerprint,
            model="digests",
            num_blocks=BLOCKS,
            span=Span(0, WIDTH),
            addresses=(),
            certificate_hash=b"",
            dtype="float32",
            kv_tokens=1 << 20,
            max_length=64,
            throughput_tokens_per_s=0.0,
            version="0",
            state=ServerState.JOINING,
        )
        await self.host.serve(await claim(record, self, fixed=False))
        self.running = group.create_task(self.rebalancer.run())

    async def end(self) -> None:
        self.running.cancel()
        if self.member.stage is not None:
            await self.member.stage.stop(0.0)

    async def publish(self, record: ServerRecord) -> None:
        if record.state is ServerState.LEAVING and record.next_span is not None:
            self.world.moves.append((now_s(), record.span, record.next_span))
        self.world.said.append((now_s(), record))

    async def snapshot(
        self, fingerprint: str | None = None, num_blocks: int | None = None
    ) -> SwarmSnapshot:
        await asyncio.sleep(0.05)
        return SwarmSnapshot(self.world.seen_by(self.peer), (), wall_s())

    # What a host asks for ----------------------------------------------------------------

    def fits_beside(self, span: Span) -> bool:
        return len(span) == WIDTH and self.speed > 40

    async def load(self, span: Span) -> Any:
        await asyncio.sleep(LOAD_S)
        return digest_stage(span.start, span.end)

    def stage(self, setup: Any) -> StageServer:
        stage = StageServer(
            StageParts(
                identity=self.identity,
                listener=self.world.network.listener(self.peer),
                dialer=self.world.network.dialer(self.peer),
                model=setup.model,
                pool=setup.pool,
                offer=setup.offer,
                limits=setup.limits,
                executor_settings=ExecutorSettings(),
                make_executor=InlineExecutor,
            )
        )

        async def measure() -> tuple[float, int]:
            return self.speed, 1 << 20

        stage.measure = measure
        return stage

    def address(self, stage: StageServer) -> str:
        return stage.endpoint.address


def live(test: Callable[[World, asyncio.TaskGroup], Awaitable[None]]) -> World:
    """Run `test` in virtual time, and stop all servers at its end."""
    world = World()

    async def watch() -> None:
        """No block is ever without a holder, unless one was lost."""
        while True:
            await asyncio.sleep(0.5)
            records = world.seen_by(None)
            if len(records) == SERVERS and all(r.throughput_tokens_per_s for r in records):
                assert holders(records, BLOCKS).all(), records

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await test(world, group)
            watching.cancel()
            for one in world.servers:
                await one.end()

    virtual_time.run(main())
    return world


async def join_all(world: World, group: asyncio.TaskGroup, speeds: list[float]) -> None:
    """Start ten servers at once."""
    async with asyncio.TaskGroup() as joining:
        for speed in speeds:
            joining.create_task(world.join(group, speed))


@pytest.mark.parametrize("seed", range(2))
def test_ten_servers_settle_and_stay(seed: int) -> None:
    """Of different speeds: no move after two minutes, and not one that is needless before."""
    speeds = np.random.default_rng(seed).uniform(30, 60, SERVERS).tolist()

    async def test(world: World, group: asyncio.TaskGroup) -> None:
        await join_all(world, group, speeds)
        await asyncio.sleep(600.0)

    world = live(test)
    assert sorted(world.spread()) == [3, 3, 4]
    assert [move for move in world.moves if move[0] > 120.0] == []
    assert len(world.moves) <= 1


def test_a_join_and_a_leave_move_as_few_as_can_be() -> None:
    first, second = Span(0, 2), Span(2, 4)

    async def test(world: World, group: asyncio.TaskGroup) -> None:
        await join_all(world, group, [50.0] * SERVERS)
        await asyncio.sleep(120.0)
        assert (world.spread(), world.moves) == ([4, 3, 3], [])
        await world.lose(second)
        await asyncio.sleep(120.0)
        assert world.spread() == [3, 3, 3]  # two thirds are a gain of a half
        assert [move[1:] for move in world.moves] == [(first, second)]
        await world.join(group)
        await asyncio.sleep(120.0)
        assert (world.spread(), len(world.moves)) == ([4, 3, 3], 1)
        for _ in range(3):
            await world.lose(second)
        await asyncio.sleep(240.0)  # first the gap, then one more: two each are twice as much
        assert sorted(world.spread()) == [2, 2, 3]
        assert len(world.moves) == 3
        await asyncio.sleep(600.0)
        assert len(world.moves) == 3

    world = live(test)
    begun = [at for at, *_ in world.moves]
    assert all(later - before > LOAD_S for before, later in zip(begun, begun[1:], strict=False))
