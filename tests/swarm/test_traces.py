"""Traced steps add up to what the client saw, whoever has the head; servers tell the sums."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.protocol.messages import Describe
from bloombee.transport.links import LinkShape
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.swarm.disturbed import THREE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.models import ModelSource
    from bloombee.protocol.messages import TraceReport

NEW = 10
DELAY_S = 0.015
TRACED = QUICK.model_copy(update={"trace": True, "micro_batches": 1})
MISSING = 0.15
"""At most so much of a round trip may be in nobody's books: turns of the one event loop here."""


@pytest.fixture
def swarm(source: ModelSource) -> Iterator[ClientSwarm]:
    with ClientSwarm(source, THREE, Size(codec="split")) as swarm:
        yield swarm


def generate(model: Any, head: str) -> None:
    ids = torch.arange(32).reshape(8, 4) + 3
    model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, head=head)


def told(swarm: ClientSwarm, model: Any) -> list[list[TraceReport]]:
    """What each stage says of the session of the last call."""
    assert model.traffic is not None
    (session,) = map(bytes.fromhex, model.traffic.sessions)
    asked = Describe(topics=("traces",), session=session)
    return [list(swarm.loop.run(stage.describe(asked)).traces) for stage in swarm.stages]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("head", ["client", "server"])
def test_the_parts_of_a_step_add_up_to_its_round_trip(swarm: ClientSwarm, head: str) -> None:
    model = swarm.model(TRACED)
    peers = [stage.endpoint.peer for stage in swarm.stages]
    generate(model, head)  # clocks are known from then on
    for one, other in ((peers[0], peers[1]), (peers[1], peers[2])):
        swarm.network.shape(one, other, LinkShape(delay_s=DELAY_S))
    generate(model, head)
    assert model.traffic is not None
    traces = model.traffic.traces
    assert len(traces) == NEW
    assert [trace.looped for trace in traces] == [head == "server" and n > 0 for n in range(NEW)]
    for trace in traces:
        assert [timing.peer for timing in trace.stages] == peers
        for timing in trace.stages:
            parts = timing.decode_us + timing.queue_us + timing.compute_us + timing.copy_us
            assert parts + timing.encode_us + timing.send_us == timing.total_us
        assert [timing.wire_us > DELAY_S * 9e5 for timing in trace.stages] == [False, True, True]
    missing = [1 - trace.known_us / trace.round_trip_us for trace in traces]
    assert abs(median(missing)) < MISSING, missing


@pytest.mark.timeout(60)
@pytest.mark.parametrize("head", ["client", "server"])
def test_servers_tell_the_sums_of_a_session(swarm: ClientSwarm, head: str) -> None:
    model = swarm.model(TRACED.model_copy(update={"trace": False}))
    generate(model, head)  # clocks are known from then on
    generate(model, head)
    peers = [stage.endpoint.peer for stage in swarm.stages]
    stages = told(swarm, model)
    assert model.traffic is not None and not model.traffic.traces
    for number, (prefill, decode) in enumerate(stages):
        assert (prefill.phase, prefill.steps, prefill.upstream == swarm.clients[-1]) == (
            "prefill",
            1,
            number == 0,
        )
        assert (decode.phase, decode.steps, decode.rows) == ("decode", NEW - 1, 8 * (NEW - 1))
        before = swarm.clients[-1] if head == "client" else peers[-1]
        assert decode.upstream == (peers[number - 1] if number else before)
        assert decode.timed_steps == decode.steps
        assert 0 <= decode.exposed_us <= decode.wire_us
        assert decode.copy_us < decode.compute_us
    for prefill, _ in stages[:-1]:
        assert 0 < prefill.bytes_out < prefill.raw_bytes_out
        assert prefill.encode_us > 0


def test_strangers_have_to_know_the_whole_id(swarm: ClientSwarm) -> None:
    model = swarm.model(TRACED)
    generate(model, "server")
    assert model.traffic is not None
    (session,) = map(bytes.fromhex, model.traffic.sessions)
    stage = swarm.stages[0]

    def seen(asker: Any, prefix: bytes) -> int:
        asked = Describe(topics=("traces",), session=prefix)
        return len(swarm.loop.run(stage.describe(asked, asker)).traces)

    owner, stranger = swarm.clients[-1], swarm.stages[1].endpoint.peer
    assert [seen(owner, b""), seen(owner, session[:4]), seen(owner, session)] == [2, 2, 2]
    assert [seen(stranger, b""), seen(stranger, session[:15]), seen(stranger, session)] == [0, 0, 2]
