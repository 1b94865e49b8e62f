"""How stages take steps, over stages that only count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bloombee.core import Span
from bloombee.errors import (
    BloomBeeError,
    ProtocolError,
    RequestError,
    StaleEpoch,
    Unsupported,
)
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import (
    Acknowledged,
    Describe,
    Description,
    Failed,
    Operations,
)
from tests.counting_pool import WIDTH
from tests.swarm.harness import (
    TWO,
    RawSession,
    Swarm,
    counting_rows,
    counting_stage,
    expect,
    run,
)

if TYPE_CHECKING:
    import torch


def test_two_stages_answer_with_what_both_computed() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), sequences=2)
        out = await session.step(counting_rows(5), {0: (0, 2), 1: (0, 3)}, want="all")
        assert out[:, 0].tolist() == [4, 5, 6, 7, 8]
        out = await session.step(counting_rows(2), {0: (2, 1), 1: (3, 1)}, phase="decode")
        assert out[:, 0].tolist() == [4, 5]
        await session.close()
        assert await s.free_tokens() == [1000, 1000]

    run(counting_stage(), counting_stage(), test=test)


def test_activations_go_from_stage_to_stage_and_never_to_the_client() -> None:
    """Byte counters: the client gets the wanted rows of the last stage and nothing else."""

    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO, Span(0, 4)), max_length=500)
        before = [link.counters.bytes_received for link in session.links]
        activations = counting_rows(450)
        await session.step(activations, {0: (0, 450)}, want="last")
        await session.step(counting_rows(1), {0: (450, 1)}, phase="decode")
        received = [
            link.counters.bytes_received - start
            for link, start in zip(session.links, before, strict=True)
        ]
        sent = [link.counters.bytes_sent for link in session.links]
        assert received[:2] == [0, 0]
        assert 2 * WIDTH * 4 < received[2] < 400
        assert sent[0] > activations.nbytes > 10 * max(sent[1:])
        hops = [way.link for stage in s.stages for held in stage.sessions for way in held.ways]
        assert len(hops) == 2
        for hop in hops:
            assert hop is not None
            counters = hop.connection.counters
            assert counters.frames_sent == 2 + 2 + 2  # hello, attach, steps, a beat and a mark
            assert activations.nbytes < counters.bytes_sent < activations.nbytes + 1000
        await session.close()

    run(counting_stage(), counting_stage(), counting_stage(), test=test)


def test_each_row_that_is_wanted() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), sequences=2)
        table = {0: (0, 2), 1: (0, 3)}
        assert (await session.step(counting_rows(5), table, want="last"))[:, 0].tolist() == [5, 8]
        nothing = await session.step(counting_rows(2), {0: (2, 1), 1: (3, 1)}, want="none")
        assert nothing.shape == (0, WIDTH)

    run(counting_stage(), counting_stage(), test=test)


def test_exact_repeats_are_acknowledged_and_dropped() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        step = session.message(counting_rows(3), {0: (0, 3)})
        await session.send(step, counting_rows(3))
        await session.output()
        await session.send(step, counting_rows(3))
        repeated = await expect(session.links[0], Acknowledged)
        assert (repeated.session, repeated.step) == (session.id, 1)
        assert (await session.step(counting_rows(1), {0: (3, 1)}))[:, 0].tolist() == [4]
        assert [stage.telemetry.snapshot()["steps"] for stage in s.stages] == [2, 2]

    run(counting_stage(), counting_stage(), test=test)


@pytest.mark.parametrize(
    ("changes", "table", "error", "says"),
    [
        ({"epoch": 1}, {0: (2, 1)}, StaleEpoch, "epoch 1"),
        ({"epoch": 3}, {0: (2, 1)}, ProtocolError, "epoch 3"),
        ({"write_kv": False}, {0: (2, 1)}, Unsupported, "recomputation"),
        ({"replay": True, "until": 1}, {0: (2, 1)}, ProtocolError, "replay up to block 1"),
        ({"replay": True, "until": 4}, {0: (1, 1)}, ProtocolError, "starts at 1"),
        ({"session": bytes(16)}, {0: (2, 1)}, ProtocolError, "another session"),
        ({"step": 1}, {0: (2, 1)}, ProtocolError, "after step 1"),
        ({}, {0: (5, 1)}, ProtocolError, "starts at 5"),
        ({}, {0: (2, 63)}, RequestError, "max_length 64"),
        ({}, {3: (0, 1)}, RequestError, "session of 1 sequences"),
    ],
)
def test_a_refused_step_leaves_the_session_as_it_was(
    changes: dict[str, object],
    table: dict[int, tuple[int, int]],
    error: type[BloomBeeError],
    says: str,
) -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), epoch=2)
        await session.step(counting_rows(2), {0: (0, 2)}, epoch=2)
        count = sum(count for _, count in table.values())
        wrong = session.message(counting_rows(count), table, **({"epoch": 2} | changes))
        await session.send(wrong, counting_rows(count))
        failed = await expect(session.links[0], Failed)
        assert (failed.session, failed.step) == (session.id, wrong.step)
        with pytest.raises(error, match=says) as caught:
            raise to_error(failed)
        assert type(caught.value) is error
        assert (await session.step(counting_rows(1), {0: (2, 1)}, epoch=2))[:, 0].tolist() == [4]

    run(counting_stage(), counting_stage(), test=test)


def test_a_payload_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        step = session.message(counting_rows(3), {0: (0, 3)})
        await session.links[0].send(step, bytes(35))
        failed = await expect(session.links[0], Failed)
        assert (failed.code, failed.step) == ("protocol", 1)
        await session.send(step, counting_rows(3))
        assert (await session.output())[:, 0].tolist() == [6]

    run(counting_stage(), counting_stage(), test=test)


def test_three_sessions_interleaved() -> None:
    async def test(s: Swarm) -> None:
        sessions = [await s.client().open(s.route(*TWO), sequences=2) for _ in range(3)]
        for position in range(4):
            for number, session in enumerate(sessions):
                table = {0: (position, 1), 1: (position, 1)}
                await session.send(
                    session.message(counting_rows(2), table), counting_rows(2) + 10 * number
                )
            for number, session in enumerate(sessions):
                out = await session.output()
                assert out[:, 0].tolist() == [10 * number + 4, 10 * number + 5]
        for session in sessions:
            await session.close()

    run(counting_stage(), counting_stage(), test=test)


def test_steps_in_flight_keep_their_order() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), max_length=100)
        for position in range(50):
            step = session.message(counting_rows(1), {0: (position, 1)}, phase="decode")
            await session.send(step, counting_rows(1) + position)
        for position in range(50):
            answer, out = await session.answer()
            assert (answer.step, out[0, 0].item()) == (position + 1, position + 4)

    run(counting_stage(), counting_stage(), test=test)


def test_operations_reach_every_stage() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), sequences=3)
        await session.step(counting_rows(5), {0: (0, 5)})
        operations = Operations(forks=((1, 0), (2, 0)), truncates=((1, 3),), releases=(2,))
        await session.step(counting_rows(2), {0: (5, 1), 1: (3, 1)}, operations=operations)
        for stage in s.stages:
            assert await stage.executor.call(lambda pool: pool.lengths(session.id)) == (6, 4, 0)
        with pytest.raises(RequestError, match="released"):
            await _first_failure(session, counting_rows(1), {2: (0, 1)})

    run(counting_stage(), counting_stage(), test=test)


def test_a_traced_step_brings_timings_of_every_stage() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        await session.send(
            session.message(counting_rows(1), {0: (0, 1)}, trace=True), counting_rows(1)
        )
        answer, _ = await session.answer()
        peers = [stage.endpoint.peer for stage in s.stages]
        assert [timing.peer for timing in answer.timings] == peers
        for timing in answer.timings:
            parts = (timing.queue_us, timing.compute_us, timing.decode_us, timing.encode_us)
            assert all(part >= 0 for part in parts)
            assert sum(parts) <= timing.total_us
            assert 0 < timing.total_us < 5e6

    run(counting_stage(), counting_stage(), test=test)


def test_describe() -> None:
    async def test(s: Swarm) -> None:
        await s.client().open(s.route(), sequences=2, max_length=100)
        link = await s.client().connect(s.stages[0])
        await link.send(Describe())
        await expect(link, Description)
        await link.send(Describe())
        told = await expect(link, Description)
        assert (told.model, told.start, told.end, told.dtype) == ("tiny", 0, 4, "float32")
        assert (told.kv_tokens, told.free_tokens, told.sessions) == (1000, 800, 1)

    run(counting_stage(), test=test)


async def _first_failure(
    session: RawSession, payload: torch.Tensor, table: dict[int, tuple[int, int]]
) -> None:
    """Send a step that the first stage refuses, and raise what it says."""
    await session.send(session.message(payload, table), payload)
    raise to_error(await expect(session.links[0], Failed))
