"""How stages answer clients and each other, over stages that only count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from bloombee.core import Span
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    KVFull,
    ProtocolError,
    RequestError,
    StaleEpoch,
    StepFailed,
    TransportError,
    Unsupported,
)
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import (
    Acknowledged,
    Attach,
    Attached,
    Close,
    Closed,
    Describe,
    Description,
    Failed,
    Open,
    Opened,
    Operations,
)
from bloombee.server.validation import Limits
from tests.counting_pool import WIDTH, AddingModel
from tests.swarm.harness import RawSession, Swarm, counting_stage, eventually, expect, swarm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.swarm.harness import StageSetup


def run(*stages: StageSetup, test: Callable[[Swarm], Awaitable[None]]) -> None:
    async def main() -> None:
        async with swarm(stages) as s:
            await test(s)

    asyncio.run(asyncio.wait_for(main(), 60))


def rows(count: int) -> torch.Tensor:
    return torch.arange(float(count))[:, None].expand(-1, WIDTH).contiguous()


TWO = (Span(0, 2), Span(2, 4))


def test_two_stages_answer_with_what_both_computed() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), sequences=2)
        out = await session.step(rows(5), {0: (0, 2), 1: (0, 3)}, want="all")
        assert out[:, 0].tolist() == [4, 5, 6, 7, 8]
        out = await session.step(rows(2), {0: (2, 1), 1: (3, 1)}, phase="decode")
        assert out[:, 0].tolist() == [4, 5]
        await session.close()
        assert await s.free_tokens() == [1000, 1000]

    run(counting_stage(), counting_stage(), test=test)


def test_activations_go_from_stage_to_stage_and_never_to_the_client() -> None:
    """Byte counters: the client gets the wanted rows of the last stage and nothing else."""

    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO, Span(0, 4)), max_length=500)
        before = [link.counters.bytes_received for link in session.links]
        activations = rows(450)
        await session.step(activations, {0: (0, 450)}, want="last")
        await session.step(rows(1), {0: (450, 1)}, phase="decode")
        received = [
            link.counters.bytes_received - start
            for link, start in zip(session.links, before, strict=True)
        ]
        sent = [link.counters.bytes_sent for link in session.links]
        assert received[:2] == [0, 0]
        assert 2 * WIDTH * 4 < received[2] < 400
        assert sent[0] > activations.nbytes > 10 * max(sent[1:])
        hops = [held.downstream for stage in s.stages for held in stage.sessions]
        for hop in hops[:2]:
            assert hop is not None
            assert hop.counters.frames_sent == 2 + 2
            assert activations.nbytes < hop.counters.bytes_sent < activations.nbytes + 1000
        assert hops[2] is None
        await session.close()

    run(counting_stage(), counting_stage(), counting_stage(), test=test)


def test_each_row_that_is_wanted() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), sequences=2)
        table = {0: (0, 2), 1: (0, 3)}
        assert (await session.step(rows(5), table, want="last"))[:, 0].tolist() == [5, 8]
        nothing = await session.step(rows(2), {0: (2, 1), 1: (3, 1)}, want="none")
        assert nothing.shape == (0, WIDTH)

    run(counting_stage(), counting_stage(), test=test)


def test_exact_repeats_are_acknowledged_and_dropped() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        step = session.message(rows(3), {0: (0, 3)})
        await session.send(step, rows(3))
        await session.output()
        await session.send(step, rows(3))
        repeated = await expect(session.links[0], Acknowledged)
        assert (repeated.session, repeated.step) == (session.id, 1)
        assert (await session.step(rows(1), {0: (3, 1)}))[:, 0].tolist() == [4]
        assert [stage.telemetry.snapshot()["steps"] for stage in s.stages] == [2, 2]

    run(counting_stage(), counting_stage(), test=test)


@pytest.mark.parametrize(
    ("changes", "table", "error", "says"),
    [
        ({"epoch": 1}, {0: (2, 1)}, StaleEpoch, "epoch 1"),
        ({"epoch": 3}, {0: (2, 1)}, Unsupported, "epoch 3"),
        ({"replay": True}, {0: (2, 1)}, Unsupported, "replay"),
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
        await session.step(rows(2), {0: (0, 2)}, epoch=2)
        count = sum(count for _, count in table.values())
        wrong = session.message(rows(count), table, **({"epoch": 2} | changes))
        await session.send(wrong, rows(count))
        failed = await expect(session.links[0], Failed)
        assert (failed.session, failed.step) == (session.id, wrong.step)
        with pytest.raises(error, match=says) as caught:
            raise to_error(failed)
        assert type(caught.value) is error
        assert (await session.step(rows(1), {0: (2, 1)}, epoch=2))[:, 0].tolist() == [4]

    run(counting_stage(), counting_stage(), test=test)


def test_a_payload_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        step = session.message(rows(3), {0: (0, 3)})
        await session.links[0].send(step, bytes(35))
        failed = await expect(session.links[0], Failed)
        assert (failed.code, failed.step) == ("protocol", 1)
        await session.send(step, rows(3))
        assert (await session.output())[:, 0].tolist() == [6]

    run(counting_stage(), counting_stage(), test=test)


class TestOpening:
    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"fingerprint": "other"}, RequestError),
            ({"start": 3, "end": 9}, RequestError),
            ({"sequences": 17}, RequestError),
            ({"max_length": 501}, RequestError),
            ({"output": "logits"}, Unsupported),
            ({"sequences": 3, "max_length": 400}, KVFull),
        ],
    )
    def test_refused_and_asked_again(
        self, changes: dict[str, object], error: type[BloomBeeError]
    ) -> None:
        async def test(s: Swarm) -> None:
            link = await s.client().connect(s.stages[0])
            good = Open(bytes(16), bytes(16), 0, "tiny", 0, 4, 2, 50, "float32")
            await link.send(msgspec.structs.replace(good, **changes))
            with pytest.raises(error) as caught:
                await expect(link, Opened)
            assert type(caught.value) is error
            assert await s.free_tokens() == [1000]
            await link.send(good)
            opened = await expect(link, Opened)
            assert (opened.held_tokens, opened.free_tokens) == ((0, 0), 900)
            assert opened.max_step_tokens == 32

        run(counting_stage(limits=Limits(max_sequences=16, max_step_tokens=32)), test=test)

    def test_kv_full_says_how_much_is_free(self) -> None:
        async def test(s: Swarm) -> None:
            first = await s.client().open(s.route(), sequences=3, max_length=300)
            with pytest.raises(KVFull, match="100 tokens free, 200 asked for"):
                await s.client().open(s.route(), sequences=1, max_length=200)
            await first.close()
            await s.client().open(s.route(), sequences=1, max_length=200)

        run(counting_stage(), test=test)

    def test_limits_of_sessions(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            sessions = [await client.open(s.route()) for _ in range(2)]
            with pytest.raises(RequestError, match="a peer may hold 2 sessions"):
                await client.open(s.route())
            sessions.append(await s.client().open(s.route()))
            with pytest.raises(RequestError, match="holds its 3 sessions"):
                await s.client().open(s.route())
            for session in sessions:
                await session.close()
            await client.open(s.route())

        limits = Limits(max_sessions=3, max_sessions_per_peer=2)
        run(counting_stage(limits=limits), test=test)

    def test_an_id_can_be_open_once(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(), epoch=1)
            again = Open(session.id, bytes(16), 0, "tiny", 0, 4, 1, 50, "float32")
            for epoch, error in ((0, StaleEpoch), (1, RequestError), (2, Unsupported)):
                link = await s.client().connect(s.stages[0])
                await link.send(Open(session.id, bytes(16), epoch, "tiny", 0, 4, 1, 50, "float32"))
                with pytest.raises(error) as caught:
                    await expect(link, Opened)
                assert type(caught.value) is error
            await session.links[0].send(again)
            with pytest.raises(StaleEpoch):
                await expect(session.links[0], Opened)

        run(counting_stage(), test=test)

    def test_an_unreachable_next_stage_is_named(self) -> None:
        async def test(s: Swarm) -> None:
            route = s.route(*TWO)
            s.network.kill(route[1].server.endpoint.peer)
            link = await s.client().connect(s.stages[0])
            opening = Open(
                bytes(16), bytes(16), 0, "tiny", 0, 2, 1, 50, "float32", next=route[1].hop
            )
            await link.send(opening)
            with pytest.raises(TransportError, match=route[1].hop.address):
                await expect(link, Opened)
            assert await s.stages[0].executor.free_tokens() == 1000

        run(counting_stage(), counting_stage(), test=test)


class TestAttaching:
    def test_wrong_secret(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route())
            link = await s.client().connect(s.stages[0])
            await link.send(Attach(session.id, bytes(16), 0))
            with pytest.raises(AuthError, match="secret"):
                await expect(link, Attached)
            await link.send(Attach(session.id, session.secret, 0))
            await expect(link, Attached)

        run(counting_stage(), test=test)

    def test_unknown_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bloombee.server.hop_stream.OPEN_DEADLINE_S", 0.02)

        async def test(s: Swarm) -> None:
            link = await s.client().connect(s.stages[0])
            await link.send(Attach(b"n" * 16, bytes(16), 0))
            with pytest.raises(RequestError, match="no such session"):
                await expect(link, Attached)

        run(counting_stage(), test=test)

    def test_only_one_side_feeds_a_session(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(*TWO))
            link = await s.client().connect(s.stages[1])
            await link.send(Attach(session.id, session.secret, 0))
            with pytest.raises(ProtocolError, match="elsewhere"):
                await expect(link, Attached)
            await session.send(session.message(rows(1), {0: (0, 1)}), rows(1), stage=1)
            with pytest.raises(ProtocolError, match="stage before"):
                await session.output()
            await session.step(rows(1), {0: (0, 1)})
            link = await s.client().connect(s.stages[0])
            await link.send(Attach(session.id, session.secret, 0))
            with pytest.raises(ProtocolError, match="elsewhere"):
                await expect(link, Attached)

        run(counting_stage(), counting_stage(), test=test)


class TestFaults:
    def test_malformed_frames_end_their_stream_only(self) -> None:
        async def test(s: Swarm) -> None:
            good = await s.client().open(s.route(*TWO))
            for frame in (b"", b"\x01", b"\x07" * 40, b"\x01" + b"\xff" * 8 + b"x" * 20):
                bad = await s.client().open(s.route(*TWO))
                await bad.links[0]._stream.send([frame])
                failed = await expect(bad.links[0], Failed)
                assert (failed.code, failed.session, failed.step) == ("protocol", bad.id, 0)
                assert await bad.links[0].receive(5.0) is None
                await bad.vanish()
            assert (await good.step(rows(1), {0: (0, 1)}))[:, 0].tolist() == [4]
            await eventually(
                lambda: _free_is(s, [1000 - 64, 1000 - 64]), "the bad sessions' KV is free"
            )

        run(counting_stage(), counting_stage(), test=test)

    def test_garbage_instead_of_a_handshake(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            stream = await client.dialer.dial(s.stages[0].endpoint, 5.0)
            await stream.send([b"GET / HTTP/1.1"])
            while await stream.receive() is not None:
                pass
            await client.open(s.route())

        run(counting_stage(), test=test)

    @pytest.mark.parametrize("in_flight", [False, True])
    def test_a_client_that_vanishes_frees_its_pages(self, in_flight: bool) -> None:
        async def test(s: Swarm) -> None:
            stays = await s.client().open(s.route(*TWO))
            goes = await s.client().open(s.route(*TWO), sequences=4)
            assert await s.free_tokens() == [1000 - 5 * 64] * 2
            if in_flight:
                await goes.send(goes.message(rows(60), {0: (0, 60)}), rows(60))
            await goes.vanish()
            await eventually(lambda: _free_is(s, [1000 - 64] * 2), "its pages are free")
            assert (await stays.step(rows(1), {0: (0, 1)}))[:, 0].tolist() == [4]
            assert [len(stage.sessions) for stage in s.stages] == [1, 1]

        run(counting_stage(), counting_stage(), test=test)

    def test_a_killed_client_frees_its_pages(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            await client.open(s.route(*TWO))
            s.network.kill(client.identity.peer_id)
            await eventually(lambda: _free_is(s, [1000] * 2), "its pages are free")

        run(counting_stage(), counting_stage(), test=test)

    def test_a_lost_next_stage_is_reported_at_once(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(*TWO))
            await session.step(rows(1), {0: (0, 1)})
            hop = s.route()[1].hop
            s.network.kill(hop.peer)
            failed = await expect(session.links[0], Failed)
            assert (failed.code, failed.step) == ("transport", 0)
            assert hop.address in failed.message
            await session.send(session.message(rows(1), {0: (1, 1)}), rows(1))
            failed = await expect(session.links[0], Failed)
            assert (failed.code, failed.step) == ("transport", 2)

        run(counting_stage(), counting_stage(), test=test)

    def test_a_failed_step_breaks_its_session_only(self) -> None:
        first, second = counting_stage(), counting_stage()
        model = second.model
        assert isinstance(model, AddingModel)

        async def test(s: Swarm) -> None:
            good, bad = [await s.client().open(s.route(*TWO)) for _ in range(2)]
            model.failing[bad.id] = RuntimeError("bad luck")
            with pytest.raises(StepFailed, match="RuntimeError: bad luck"):
                await bad.step(rows(1), {0: (0, 1)})
            model.failing.clear()
            with pytest.raises(StepFailed, match="step 1 failed .* open a new session"):
                await bad.step(rows(1), {0: (1, 1)})
            assert (await good.step(rows(1), {0: (0, 1)}))[:, 0].tolist() == [4]

        run(first, second, test=test)

    def test_a_stopping_server_says_so(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(*TWO))
            await s.stages[1].stop(1.0)
            failed = await expect(session.links[1], Failed)
            assert (failed.code, failed.step) == ("stopping", 0)
            with pytest.raises(TransportError):
                await s.client().connect(s.stages[1])

        run(counting_stage(), counting_stage(), test=test)


def test_three_sessions_interleaved() -> None:
    async def test(s: Swarm) -> None:
        sessions = [await s.client().open(s.route(*TWO), sequences=2) for _ in range(3)]
        for position in range(4):
            for number, session in enumerate(sessions):
                table = {0: (position, 1), 1: (position, 1)}
                await session.send(session.message(rows(2), table), rows(2) + 10 * number)
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
            step = session.message(rows(1), {0: (position, 1)}, phase="decode")
            await session.send(step, rows(1) + position)
        for position in range(50):
            answer, out = await session.answer()
            assert (answer.step, out[0, 0].item()) == (position + 1, position + 4)

    run(counting_stage(), counting_stage(), test=test)


def test_operations_reach_every_stage() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO), sequences=3)
        await session.step(rows(5), {0: (0, 5)})
        operations = Operations(forks=((1, 0), (2, 0)), truncates=((1, 3),), releases=(2,))
        await session.step(rows(2), {0: (5, 1), 1: (3, 1)}, operations=operations)
        for stage in s.stages:
            assert await stage.executor.call(lambda pool: pool.lengths(session.id)) == (6, 4, 0)
        with pytest.raises(RequestError, match="released"):
            await _first_failure(session, rows(1), {2: (0, 1)})

    run(counting_stage(), counting_stage(), test=test)


def test_a_traced_step_brings_timings_of_every_stage() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        await session.send(session.message(rows(1), {0: (0, 1)}, trace=True), rows(1))
        answer, _ = await session.answer()
        peers = [stage.endpoint.peer for stage in s.stages]
        assert [timing.peer for timing in answer.timings] == peers
        for timing in answer.timings:
            assert 0 <= timing.queue_us + timing.compute_us + timing.codec_us <= timing.total_us
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


def test_closing_with_steps_in_flight() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        await session.send(session.message(rows(40), {0: (0, 40)}), rows(40))
        for link in session.links:
            await link.send(Close(session.id))
        for link in session.links:
            while (received := await link.receive(5.0)) is not None:
                if isinstance(received[0], Closed):
                    break
            assert received is not None
        assert await s.free_tokens() == [1000, 1000]

    run(counting_stage(), counting_stage(), test=test)


async def _free_is(s: Swarm, expected: list[int]) -> bool:
    return await s.free_tokens() == expected


async def _first_failure(
    session: RawSession, payload: torch.Tensor, table: dict[int, tuple[int, int]]
) -> None:
    """Send a step that the first stage refuses, and raise what it says."""
    await session.send(session.message(payload, table), payload)
    raise to_error(await expect(session.links[0], Failed))
