"""Servers are told to stop under a running `generate`: sessions move, tokens stay the same."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from bloombee.server.holdings import Holdings
from tests.generation import mixed, prompt
from tests.swarm.disturbed import (
    GREEDY,
    IDS,
    NEW,
    THREE,
    all_free,
    favour,
    killer,
    same,
    spares,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from bloombee.server.stage import StageServer
    from tests.client_swarm import ClientSwarm

DRAIN_S = 20.0
SOON_S = 5.0
"""For a drain to end once its last session has gone; far less than DRAIN_S."""
MIXED_IDS, MIXED_MASK = mixed([3, 9, 6], "left")
KINDS: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "greedy": (IDS, {}),
    "batch": (MIXED_IDS, {"attention_mask": MIXED_MASK}),
    "beams": (prompt(2, 7), {"num_beams": 3}),
    "lookup": (IDS.repeat(1, 3), {"prompt_lookup_num_tokens": 3}),
}


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick the tiny model is, its pages are worth fetching."""
    monkeypatch.setattr(Holdings, "replay_s", 30.0)


def drain(swarm: ClientSwarm, stage: StageServer) -> Future[None]:
    """Tell a stage to drain; callable from any thread."""
    return asyncio.run_coroutine_threadsafe(stage.drain(DRAIN_S), swarm.loop._loop)


class Drains:
    """Drains stages in the middle of something, and waits for them."""

    def __init__(self, swarm: ClientSwarm) -> None:
        self._swarm = swarm
        self._running: list[Future[None]] = []

    def at_pass(self, stage: StageServer, number: int) -> None:
        self._swarm.at_pass(stage, number, lambda: self.now(stage))

    def now(self, stage: StageServer) -> None:
        self._running.append(drain(self._swarm, stage))

    def end(self, count: int, deadline_s: float = SOON_S) -> None:
        """As many as were started have no session left."""
        assert len(self._running) == count
        for each in self._running:
            each.result(deadline_s)


def counted(stage: StageServer, name: str) -> int:
    return int(stage.telemetry.snapshot()[name])


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    ("index", "kind"),
    [(0, "greedy"), (1, "greedy"), (2, "greedy"), (0, "lookup"), (1, "beams"), (2, "batch")],
)
def test_a_session_moves_and_nothing_is_computed_again(
    three: ClientSwarm, local: Any, index: int, kind: str
) -> None:
    ids, arguments = KINDS[kind]
    doomed, drains = three.stages[index], Drains(three)
    favour(three, doomed)
    spare = three.add(THREE[index])
    drains.at_pass(doomed, 4)
    model = three.model()
    same(local, model, ids, **arguments)
    assert three.serving(model, index) is spare
    assert (counted(spare, "fetched_sessions"), counted(spare, "fetches_given_up")) == (1, 0)
    assert counted(doomed, "handed_over_sessions") == 1
    assert model.traffic is not None and model.traffic.replayed_tokens == 0
    assert counted(doomed, "steps") + counted(spare, "steps") == counted(
        three.stages[(index + 1) % 3], "steps"
    )
    drains.end(1)
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_all_servers_one_after_the_other(three: ClientSwarm, local: Any) -> None:
    """As for an update of a whole swarm, during one chat; each is gone before the next goes."""
    old = list(three.stages)
    for stage in old:
        favour(three, stage)
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=2)
        for index, stage in enumerate(old):
            spare = three.add(THREE[index])
            drain(three, stage).result(SOON_S)
            three.now(killer(three, stage))
            same(local, model, max_new_tokens=4 + 2 * index)
            assert three.serving(model, index) is spare
        assert model.traffic is not None and model.traffic.replayed_tokens == 0
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_neighbours_at_once(three: ClientSwarm, local: Any) -> None:
    drains, (first, second, _) = Drains(three), three.stages
    favour(three, first)
    favour(three, second)
    spares(three)
    drains.at_pass(first, 4)
    drains.at_pass(second, 4)
    model = three.model()
    same(local, model)
    assert not {first, second} & {three.serving(model, index) for index in range(3)}
    drains.end(2)
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_an_idle_session_moves_at_once(three: ClientSwarm, local: Any) -> None:
    """Between two turns of a chat: nobody asks for anything, and the server can go."""
    drains, doomed = Drains(three), three.stages[1]
    favour(three, doomed)
    spare = three.add(THREE[1])
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        drains.now(doomed)
        drains.end(1)
        assert len(doomed.sessions) == 0
        three.now(lambda: three.kill(doomed))
        same(local, model)
        assert three.serving(model, 1) is spare
        assert model.traffic is not None and model.traffic.replayed_tokens == 0
    all_free(three)


def test_replay_where_that_is_cheaper(
    three: ClientSwarm, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holdings, "replay_s", 1e-6)
    drains, doomed = Drains(three), three.stages[1]
    favour(three, doomed)
    spare = three.add(THREE[1])
    drains.at_pass(doomed, 4)
    model = three.model()
    same(local, model)
    assert three.serving(model, 1) is spare
    assert (counted(spare, "fetched_sessions"), counted(spare, "fetches_given_up")) == (0, 1)
    assert model.traffic is not None and model.traffic.replayed_tokens > 0
    drains.end(1)
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_the_old_server_dies_while_it_hands_over(
    three: ClientSwarm, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains, doomed = Drains(three), three.stages[1]
    favour(three, doomed)
    three.add(THREE[1])
    hand_overs = doomed._handler._parts.hand_overs
    send, loop = hand_overs._send_pages, three.loop._loop

    async def dies(*arguments: Any) -> Any:
        loop.call_soon(three.kill, doomed)
        return await send(*arguments)

    monkeypatch.setattr(hand_overs, "_send_pages", dies)
    drains.at_pass(doomed, 4)
    model = three.model()
    same(local, model)
    assert model.traffic is not None and model.traffic.replayed_tokens > 0
    all_free(three)


def test_the_only_holder_serves_to_the_end(three: ClientSwarm, local: Any) -> None:
    drains, doomed = Drains(three), three.stages[1]
    drains.at_pass(doomed, 4)
    model = three.model()
    same(local, model, max_new_tokens=3 * NEW)
    assert three.serving(model, 1) is doomed
    assert model.traffic is not None and model.traffic.replayed_tokens == 0
    drains.end(1)
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_a_holder_that_joins_later_takes_over(three: ClientSwarm, local: Any) -> None:
    """There is nobody to move to at first, and then there is."""
    drains, doomed = Drains(three), three.stages[1]
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        drains.now(doomed)
        threading.Event().wait(0.3)
        assert len(doomed.sessions) == 1
        spare = three.add(THREE[1])
        begun = time.monotonic()
        same(local, model)
        drains.end(1, DRAIN_S)
        assert time.monotonic() - begun < DRAIN_S / 2
        assert three.serving(model, 1) is spare
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_a_neighbour_is_lost_meanwhile(three: ClientSwarm, local: Any) -> None:
    drains, (_, leaving, dying) = Drains(three), three.stages
    favour(three, leaving)
    favour(three, dying)
    spares(three)

    def both() -> None:
        drains.now(leaving)
        three.kill(dying)

    three.at_pass(leaving, 4, both)
    model = three.model()
    same(local, model)
    assert not {leaving, dying} & {three.serving(model, index) for index in range(3)}
    drains.end(1)
    all_free(three)


@pytest.mark.usefixtures("pages")
def test_a_parked_session_moves(three: ClientSwarm, local: Any) -> None:
    """See `GREEDY`: its KV lies in host memory when it is fetched."""
    drains, doomed = Drains(three), three.stages[1]
    favour(three, doomed)
    spare = three.add(THREE[1])
    model = three.model()
    with model.inference_session(max_length=80):
        same(local, model, max_new_tokens=3)
        (session,) = doomed.sessions

        async def park() -> None:
            holding = doomed.admission._holdings[session.id]
            while holding.saved is None:
                await doomed.admission._parking.advance(holding)

        three.loop.run(park())
        assert doomed.admission.is_away(session.id)
        drains.now(doomed)
        drains.end(1)
        same(local, model, **GREEDY)
        assert three.serving(model, 1) is spare
        assert model.traffic is not None and model.traffic.replayed_tokens == 0
    all_free(three)
