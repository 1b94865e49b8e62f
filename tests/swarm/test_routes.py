"""Clients of one swarm find out what servers cost and how busy they are, and spread over them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bloombee.core import PeerId, Span
from bloombee.protocol.messages import CostTable, Describe, Description, TimeGrid
from bloombee.transport.links import LinkShape
from tests.client_swarm import QUICK, ClientSwarm
from tests.generation import prompt
from tests.swarm.disturbed import GREEDY, peer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.models import ModelSource
    from bloombee.server.stage import StageServer

CURIOUS = QUICK.model_copy(update={"survey_s": 1.0})
WHOLE = Span(0, 5)
IDS = prompt(1, 5)


@pytest.fixture
def two(source: ModelSource) -> Iterator[ClientSwarm]:
    """Two replicas of the whole model, neither of which announces to be faster."""
    with ClientSwarm(source, (WHOLE, WHOLE)) as swarm:
        yield swarm


def tells(
    stage: StageServer, block_s: float, gate: asyncio.Event | None = None, **more: Any
) -> list[Describe]:
    """Let a stage say that its blocks take so long, twice that for twice the rows; who asked.

    `more` changes other fields, to what the functions say of the stage. With `gate` it says
    nothing until that is set.
    """
    grid = TimeGrid((1, 2), (0,), ((block_s,), (2 * block_s,)))
    costs = CostTable("cpu", grid, grid, None, 0.0, 0, 0, 0, 0)
    describe, asked = stage.describe, list[Describe]()

    async def told(question: Describe, *asker: Any) -> Description:
        asked.append(question)
        if gate is not None:
            await gate.wait()
        plain = msgspec.structs.replace(await describe(question, *asker), decode_rows=0, busy=0.0)
        changed = {name: value(stage) for name, value in more.items()}
        told_costs = costs if asked[-1].topics else None
        return msgspec.structs.replace(plain, costs=told_costs, **changed)

    handler: Any = stage._handler
    handler._parts = replace(handler._parts, describe=told)
    return asked


def slow_down(stage: StageServer, seconds: float) -> None:
    """Let every pass of a stage take so much longer."""
    model: Any = stage._parts.model
    forward = model.forward

    def slowly(*arguments: Any, **named: Any) -> torch.Tensor:
        threading.Event().wait(seconds)
        return forward(*arguments, **named)

    model.forward = slowly


def taken(model: DistributedModelForCausalLM) -> PeerId:
    assert model.route is not None
    return model.route.stages[0].peer


def rows_held(stage: StageServer) -> int:
    return len(stage.sessions)


def test_clients_that_come_one_by_one_spread_over_replicas(two: ClientSwarm) -> None:
    """All draw the same numbers: only what the servers tell of their load parts them."""
    for stage in two.stages:
        tells(stage, 0.004, decode_rows=rows_held)
    with ExitStack() as stack:
        models = [two.model(CURIOUS) for _ in range(8)]
        for model in models:
            stack.enter_context(model.inference_session(max_length=16))
            model.generate(IDS, max_new_tokens=2, **GREEDY)
        counts = Counter(taken(model) for model in models)
    assert sorted(counts.values()) == [4, 4]


def test_a_client_counts_its_own_sessions_that_servers_have_not_told_of(two: ClientSwarm) -> None:
    asked = [tells(stage, 0.004) for stage in two.stages]
    model, counts = two.model(CURIOUS), Counter[PeerId]()
    with ExitStack() as stack:
        for _ in range(6):
            session = stack.enter_context(model.inference_session(max_length=16))
            model.generate(IDS, max_new_tokens=2, **GREEDY)
            counts[taken(model)] += 1
            del session
    assert sorted(counts.values()) == [3, 3]
    assert [len(each) for each in asked] == [1, 1]


def test_the_replica_that_is_faster_is_taken_whatever_was_announced(two: ClientSwarm) -> None:
    slow, fast = two.stages
    two.speeds[slow.endpoint.peer] = 1e5
    tells(slow, 0.05)
    tells(fast, 0.001)
    model = two.model(CURIOUS)
    model.generate(IDS, max_new_tokens=2, **GREEDY)
    assert taken(model) == peer_of(fast)


def test_a_far_replica_is_left_alone_until_the_near_one_is_full(two: ClientSwarm) -> None:
    far, near = two.stages
    free = {"tokens": 4000}
    tells(far, 0.001)
    tells(near, 0.001, free_tokens=lambda _: free["tokens"])
    first, second = two.model(CURIOUS), two.model(CURIOUS)
    for client in two.clients:
        two.network.shape(client, far.endpoint.peer, LinkShape(delay_s=0.04))
        two.network.shape(far.endpoint.peer, client, LinkShape(delay_s=0.04))
    first.generate(IDS, max_new_tokens=2, head="client", **GREEDY)
    assert taken(first) == peer_of(near)
    free["tokens"] = 0
    second.generate(IDS, max_new_tokens=2, head="client", **GREEDY)
    assert taken(second) == peer_of(far)


def test_servers_that_say_nothing_delay_the_first_session_by_a_moment_only(
    two: ClientSwarm,
) -> None:
    hushed, open_minded = two.stages
    gate = asyncio.Event()
    asked = tells(hushed, 0.0001, gate=gate)
    tells(open_minded, 0.001)
    model = two.model(CURIOUS.model_copy(update={"survey_s": 0.2}))
    began = time.monotonic()
    model.generate(IDS, max_new_tokens=2, **GREEDY)
    assert 0.2 < time.monotonic() - began < 2
    assert len(asked) == 1
    two.now(gate.set)


def test_nobody_is_asked_where_there_is_no_choice(three: ClientSwarm) -> None:
    asked = [tells(stage, 0.001) for stage in three.stages]
    three.model(CURIOUS).generate(IDS, max_new_tokens=2, **GREEDY)
    assert asked == [[], [], []]


def test_a_server_far_slower_than_it_says_is_left_after_a_session(
    two: ClientSwarm,
) -> None:
    liar, honest = two.stages
    tells(liar, 0.0001)
    tells(honest, 0.002)
    slow_down(liar, 0.05)
    model = two.model(CURIOUS)
    model.generate(IDS, max_new_tokens=12, **GREEDY)
    assert taken(model) == peer_of(liar)
    model.generate(IDS, max_new_tokens=12, **GREEDY)
    assert taken(model) == peer_of(honest)
