"""Lost blocks that nobody else holds but who serves others of the same session."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bloombee.core import Span
from tests.client_swarm import QUICK
from tests.swarm.disturbed import IDS, favour, peer_of, recoveries, same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.server.stage import StageServer
    from bloombee.swarm.records import ServerRecord
    from bloombee.swarm.view import SwarmSnapshot
    from tests.client_swarm import ClientSwarm


def test_a_server_that_serves_a_neighbour_takes_both(three: ClientSwarm, local: Any) -> None:
    """Nobody else has the lost blocks, but one who serves others of this session has them too."""
    doomed = three.stages[0]
    three.lost.add(peer_of(three.stages[1]))
    whole = three.add(Span(0, 4))
    three.speeds[peer_of(whole)] = 0.01
    three.at_pass(doomed, 5, lambda: three.kill(doomed))
    favour(three, doomed)
    looks = counted_looks(three)
    model = three.model()
    with model.inference_session(max_length=80):
        three.lost.add(peer_of(whole))
        three.lost.discard(peer_of(three.stages[1]))
        model(IDS[:, :1])
        three.lost.discard(peer_of(whole))
        before = next(looks)
        same(local, model)
        assert next(looks) - before - 1 <= 1  # one look, and it is plain what to do
    assert recoveries(model) == 1


def counted_looks(swarm: ClientSwarm) -> Iterator[int]:
    """Counts the looks at the swarm, and every `next`."""
    looks, look = itertools.count(), swarm.look

    async def counted() -> SwarmSnapshot:
        next(looks)
        return await look()

    swarm.look = counted
    return looks


def test_holders_that_failed_of_late_are_waited_for(three: ClientSwarm, local: Any) -> None:
    """They may be back at once; who serves another part keeps it."""
    whole = three.add(Span(0, 4))
    doomed, spare = three.stages[0], three.add(Span(0, 2))
    three.lost.update({peer_of(three.stages[1]), peer_of(spare)})
    favour(three, doomed)
    record = three.record

    def shortened(stage: StageServer) -> ServerRecord:
        """Of the one that could serve all, only what makes it the second stage."""
        return replace(record(stage), span=Span(2, 4)) if stage is whole else record(stage)

    three.record = shortened
    model = three.model(QUICK.model_copy(update={"backoff_s": 0.05}))
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        assert three.serving(model, 1) is whole
        three.record = record
        three.lost.discard(peer_of(spare))

        def fail() -> None:
            model._access.health.failed(peer_of(spare), three.loop._loop.time())
            three.kill(doomed)

        three.now(fail)
        same(local, model)
        assert three.serving(model, 0) is spare
        assert three.serving(model, 1) is whole
