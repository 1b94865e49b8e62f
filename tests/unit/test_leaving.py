"""How a server leaves: in which order, how fast, and what it says when it can't go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from bloombee.core import PeerId, Span
from bloombee.errors import BloomBeeError, StepFailed, SwarmError
from bloombee.server.leaving import Membership
from bloombee.swarm.records import ServerRecord, ServerState
from tests import virtual_time

RECORD = ServerRecord(
    peer=PeerId("p"),
    fingerprint="f",
    model="m",
    num_blocks=4,
    span=Span(0, 4),
    addresses=("127.0.0.1:1",),
    certificate_hash=b"",
    dtype="float32",
    kv_tokens=1,
    max_length=1,
    throughput_tokens_per_s=1.0,
    version="0",
    state=ServerState.ONLINE,
)


@dataclass
class World:
    """A node and a stage that note what is done with them, and when."""

    sessions: list[int]
    publish_s: float = 0.0
    refuses: bool = False
    gone: SwarmError | None = None
    bug: Exception | None = None
    done: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.done.append(f"{asyncio.get_running_loop().time():.1f} {what}")

    async def publish(self, record: ServerRecord) -> None:
        await asyncio.sleep(self.publish_s)
        if self.refuses:
            raise SwarmError("nobody listens")
        assert record == replace(RECORD, state=ServerState.LEAVING)
        self.note("published")

    async def drain(self, drain_s: float) -> None:
        await asyncio.sleep(drain_s)
        self.note("drained")

    async def stop(self, grace_s: float) -> None:
        assert 0 < grace_s < 4
        self.note("stopped")

    async def close(self) -> None:
        self.note("closed")

    async def lost(self) -> SwarmError:
        return self.gone or await asyncio.get_running_loop().create_future()

    async def failed(self) -> Exception:
        return self.bug or await asyncio.get_running_loop().create_future()


def left(world: World, ends_s: float | None = 1.0, drain_s: float = 3.0) -> list[str]:
    """What is done by a server that is cancelled after `ends_s`, if it is."""
    fake = cast("Any", world)

    async def serve() -> None:
        async with Membership(fake, drain_s) as member:
            member.stage, member.online = fake, RECORD
            raise await member.ended()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve())
            if ends_s is not None:
                await asyncio.sleep(ends_s)
                serving.cancel()

    virtual_time.run(main())
    return world.done


def test_sessions_are_drained_before_the_rest() -> None:
    order = left(World(sessions=[1]))
    assert order[:2] == ["1.0 published", "4.0 drained"]
    assert sorted(order[2:]) == ["4.0 closed", "4.0 stopped"]


def test_without_sessions_nothing_is_waited_for() -> None:
    assert sorted(left(World(sessions=[]))) == ["1.0 closed", "1.0 stopped"]


@pytest.mark.parametrize("world", [World([1], refuses=True), World([1], publish_s=60.0)])
def test_a_swarm_that_does_not_listen_is_not_waited_for(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert sorted(left(world)) == ["4.0 closed", "4.0 drained", "4.0 stopped"]
    assert "the swarm has not heard that we leave" in caplog.text


@pytest.mark.parametrize(
    ("world", "kind", "says"),
    [
        (World([1], gone=SwarmError("no daemon")), SwarmError, "no daemon"),
        (World([1], bug=KeyError("a\nb")), StepFailed, r"after a bug: KeyError: 'a\\nb'"),
    ],
)
def test_one_that_can_not_go_on_says_why_and_leaves(
    world: World, kind: type[BloomBeeError], says: str
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(kind, match=says)):
        left(world, None)
    assert sorted(world.done) == ["0.0 closed", "0.0 stopped"]
