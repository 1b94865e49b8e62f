"""A server takes other blocks under a running `generate`: sessions move, tokens stay the same."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from bloombee.core import PeerId, Span
from bloombee.errors import ModelError
from bloombee.planner.moves import Move
from bloombee.server.background import in_background
from bloombee.server.holdings import Holdings
from bloombee.server.hosting import Host
from bloombee.server.leaving import Membership
from bloombee.server.rebalancing import Rebalancer, Rhythm
from bloombee.swarm.identity import Identity
from bloombee.swarm.records import ServerRecord, ServerState
from tests.client_swarm import QUICK
from tests.swarm.disturbed import THREE, all_free, same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.models import SpanModel
    from bloombee.server.stage import StageServer
    from bloombee.swarm.view import SwarmSnapshot
    from tests.client_swarm import ClientSwarm

DRAIN_S = 5.0


class Mover:
    """One server of a swarm whose other servers stay; it is its own noticeboard and maker."""

    def __init__(self, swarm: ClientSwarm, span: Span, *, beside: bool = True) -> None:
        self.swarm = swarm
        self.identity = Identity.load_or_create(None)
        self.said: list[str] = []
        self.broken: set[Span] = set()
        self._beside = beside
        self.member = Membership(cast("Any", self), DRAIN_S)
        self.host = Host(self.member, self, self, drain_s=DRAIN_S, clock=time.monotonic)
        swarm.speeds[self.identity.peer_id] = 1e6
        stage = swarm.build(swarm.load(span), self.identity)
        joining = replace(swarm.record(stage), state=ServerState.JOINING)
        swarm.loop.run(self.host.serve(joining))

    # What a host asks for ----------------------------------------------------------------

    def fits_beside(self, span: Span) -> bool:
        return self._beside and span in THREE

    async def load(self, span: Span) -> SpanModel:
        if span in self.broken:
            raise ModelError(f"no blocks {span} on this disk; download them again")
        return await in_background(lambda: self.swarm.load(span))

    def stage(self, model: SpanModel) -> StageServer:
        return self.swarm.build(model, self.identity)

    def address(self, stage: StageServer) -> str:
        return stage.endpoint.address

    async def publish(self, record: ServerRecord) -> None:
        self.said.append(f"{record.state} {record.span} {record.next_span or ''}".strip())
        fast = replace(record, throughput_tokens_per_s=1e6)  # routing is to prefer it
        self.swarm.extra_records[:] = [fast]

    async def snapshot(
        self, fingerprint: str | None = None, num_blocks: int | None = None
    ) -> SwarmSnapshot:
        assert (fingerprint, num_blocks) == (self.swarm.source.fingerprint, 5)
        seen = await self.swarm.look()
        records = (replace(r, pinned=r.peer != self.identity.peer_id) for r in seen.records)
        return replace(seen, records=tuple(records))

    # What tests do -------------------------------------------------------------------------

    @property
    def serving(self) -> StageServer:
        assert self.member.stage is not None
        return self.member.stage

    def towards(self, to: Span) -> Move:
        return Move(self.identity.peer_id, self.host.record.span, to, 2.0)

    def at_pass(self, number: int, to: Span) -> None:
        """Begin to move in the middle of a pass."""
        self.moved: asyncio.Task[bool] | None = None

        def begin() -> None:
            self.moved = asyncio.get_running_loop().create_task(self.host.move(self.towards(to)))

        self.swarm.at_pass(self.serving, number, begin)

    def end(self) -> bool:
        async def wait() -> bool:
            assert self.moved is not None
            return await asyncio.wait_for(self.moved, DRAIN_S + 5)

        return self.swarm.loop.run(wait())

    def close(self) -> None:
        self.swarm.loop.run(self.serving.stop(1.0))


@pytest.fixture
def mover(three: ClientSwarm, request: pytest.FixtureRequest) -> Iterator[Mover]:
    """A fourth server, of the second third of the blocks."""
    mover = Mover(three, THREE[1], beside=getattr(request, "param", True))
    yield mover
    mover.close()


def peers(model: Any) -> list[PeerId]:
    return [stage.peer for stage in model.route.stages]


@pytest.mark.parametrize("mover", [True, False], indirect=True, ids=["beside", "after"])
def test_it_moves_under_a_running_generation(
    three: ClientSwarm, local: Any, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holdings, "replay_s", 30.0)  # pages are worth fetching
    old = weakref.ref(cast("Any", mover.serving)._parts.model)
    mover.at_pass(4, THREE[0])
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=30)
        assert mover.end()
        assert peers(model)[1] == three.stages[1].endpoint.peer
        assert model.traffic is not None and model.traffic.replayed_tokens == 0
    assert (
        mover.said
        == [
            "joining 2:4",
            "online 2:4",
            "leaving 2:4 0:2",
            "joining 0:2",
            "online 0:2",
        ][1:]
    )
    assert mover.host.record.moved_at_s > 0
    gc.collect()
    assert old() is None, "the weights that it left are still in memory"
    again = three.model()
    same(local, again)
    assert peers(again)[0] == mover.identity.peer_id
    all_free(three)


@pytest.mark.parametrize("mover", [True, False], indirect=True, ids=["beside", "after"])
def test_what_it_can_not_load_it_does_not_take(
    three: ClientSwarm, local: Any, mover: Mover, caplog: pytest.LogCaptureFixture
) -> None:
    mover.broken.add(THREE[0])
    mover.at_pass(4, THREE[0])
    model = three.model()
    same(local, model, max_new_tokens=30)
    assert not mover.end()
    assert "no blocks 0:2 on this disk" in caplog.text
    assert mover.said[-1] == "online 2:4"
    same(local, three.model())
    all_free(three)


def test_the_last_holder_stays(three: ClientSwarm, local: Any, mover: Mover) -> None:
    """The other one vanishes when it has begun to leave."""
    other = three.stages[1].endpoint.peer
    three.lost.add(PeerId(other))
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        assert not three.loop.run(mover.host.move(mover.towards(THREE[0])))
        same(local, model)
        assert peers(model)[1] == mover.identity.peer_id
    assert mover.said[-2:] == ["leaving 2:4 0:2", "online 2:4"]
    same(local, three.model())
    all_free(three)


def test_it_closes_a_gap_by_itself(three: ClientSwarm, local: Any, mover: Mover) -> None:
    """Nobody tells it to; a client that waits for the lost blocks goes on."""
    rebalancer = Rebalancer(
        mover, mover.host, lambda: 0.5, rhythm=Rhythm(every_s=0.2, settle_s=0.05)
    )
    running = asyncio.run_coroutine_threadsafe(rebalancer.run(), three.loop._loop)
    model = three.model(QUICK.model_copy(update={"recovery_s": 30.0}))
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        assert mover.said == ["online 2:4"]
        threading.Event().wait(0.5)
        assert mover.said == ["online 2:4"], "nothing was lost: it has to stay"
        gone = three.stages[0]
        three.lost.add(PeerId(gone.endpoint.peer))
        three.now(lambda: three.kill(gone))
        same(local, model)
        assert peers(model) == [
            mover.identity.peer_id,
            *(stage.endpoint.peer for stage in three.stages[1:]),
        ]
    assert mover.said[1:] == [
        "online 2:4 0:2",
        "leaving 2:4 0:2",
        "joining 0:2",
        "online 0:2",
    ]
    running.cancel()
    all_free(three)
