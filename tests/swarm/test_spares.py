"""Spares: known before they are needed, near to the client and to the stage before."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from tests.swarm.disturbed import GREEDY, IDS, THREE, favour, killer, peer_of, same
from tests.swarm.disturbed import spares as add_spares

if TYPE_CHECKING:
    from collections.abc import Callable

    from bloombee.transport.interface import Endpoint
    from bloombee.transport.memory_stream import MemoryStream
    from tests.client_swarm import ClientSwarm


def watch(swarm: ClientSwarm) -> list[tuple[str, str]]:
    """Who dials whom from now on."""
    dials: list[tuple[str, str]] = []
    dial = swarm.network.open

    async def noted(dialer: Any, endpoint: Endpoint) -> MemoryStream:
        dials.append((dialer.peer, endpoint.peer))
        return await dial(dialer, endpoint)

    swarm.network.open = noted
    return dials


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def test_client_and_the_stage_before_reach_the_spares_at_once(three: ClientSwarm) -> None:
    for stage in three.stages:
        favour(three, stage)
    stood = [peer_of(stage) for stage in three.stages]
    spares = [peer_of(stage) for stage in add_spares(three)]
    model = three.model()
    dials = watch(three)
    with model.inference_session(max_length=40):
        model.generate(IDS, max_new_tokens=2, **GREEDY)
        me = three.clients[0]
        wanted = {(me, spare) for spare in spares} | set(zip(stood, spares[1:], strict=False))
        wait_until(lambda: wanted <= set(dials))
        assert all(not stage.sessions for stage in three.stages[3:])
        assert three.free_tokens()[3:] == [three.size.kv_tokens] * 3
    assert not [dialer for dialer, _ in dials if dialer in spares]


def test_the_spare_that_was_reached_takes_over(three: ClientSwarm, local: Any) -> None:
    for stage in three.stages:
        favour(three, stage)
    spares = add_spares(three, THREE[1], THREE[1], THREE[1])
    model = three.model()
    dials = watch(three)
    with model.inference_session(max_length=40):
        text = model.generate(IDS, max_new_tokens=3, **GREEDY)
        peers = {peer_of(stage): stage for stage in spares}
        wait_until(lambda: len(peers.keys() & {to for _, to in dials}) > 0)
        (near,) = peers.keys() & {to for _, to in dials}
        for stage in spares:
            favour(three, stage, 1e6 if stage is not peers[near] else 1.0)
        three.now(killer(three, three.stages[1]))
        same(local, model, text)
        assert three.serving(model, 1) is peers[near]


def test_a_spare_that_died_is_passed_over(three: ClientSwarm, local: Any) -> None:
    for stage in three.stages:
        favour(three, stage)
    spares = add_spares(three, THREE[1], THREE[1])
    model = three.model()
    dials = watch(three)
    with model.inference_session(max_length=40):
        text = model.generate(IDS, max_new_tokens=3, **GREEDY)
        peers = {peer_of(stage): stage for stage in spares}
        wait_until(lambda: len(peers.keys() & {to for _, to in dials}) > 0)
        (near,) = peers.keys() & {to for _, to in dials}
        three.now(killer(three, peers[near]))
        three.now(killer(three, three.stages[1]))
        same(local, model, text)
        (other,) = [stage for stage in spares if stage is not peers[near]]
        assert three.serving(model, 1) is other
