"""Faults stay where they are: one stream, one session, one client, one stage."""

from __future__ import annotations

import pytest

from bloombee.errors import (
    StepFailed,
    TransportError,
)
from bloombee.protocol.messages import (
    Close,
    Closed,
    Failed,
)
from tests.counting_pool import AddingModel
from tests.swarm.harness import (
    TWO,
    Swarm,
    counting_rows,
    counting_stage,
    expect,
    kv_freed,
    run,
)


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
            assert (await good.step(counting_rows(1), {0: (0, 1)}))[:, 0].tolist() == [4]
            await kv_freed(s, 1000 - 64, 1000 - 64)

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
                await goes.send(goes.message(counting_rows(60), {0: (0, 60)}), counting_rows(60))
            await goes.vanish()
            await kv_freed(s, 1000 - 64, 1000 - 64)
            assert (await stays.step(counting_rows(1), {0: (0, 1)}))[:, 0].tolist() == [4]
            assert [len(stage.sessions) for stage in s.stages] == [1, 1]

        run(counting_stage(), counting_stage(), test=test)

    def test_a_killed_client_frees_its_pages(self) -> None:
        async def test(s: Swarm) -> None:
            client = s.client()
            await client.open(s.route(*TWO))
            s.network.kill(client.identity.peer_id)
            await kv_freed(s, 1000, 1000)

        run(counting_stage(), counting_stage(), test=test)

    def test_a_lost_next_stage_is_reported_at_once(self) -> None:
        async def test(s: Swarm) -> None:
            session = await s.client().open(s.route(*TWO))
            await session.step(counting_rows(1), {0: (0, 1)})
            hop = s.route()[1].hop
            s.network.kill(hop.peer)
            failed = await expect(session.links[0], Failed)
            assert (failed.code, failed.step) == ("hop-lost", 0)
            assert hop.address in failed.message
            await session.send(session.message(counting_rows(1), {0: (1, 1)}), counting_rows(1))
            failed = await expect(session.links[0], Failed)
            assert (failed.code, failed.step) == ("hop-lost", 2)

        run(counting_stage(), counting_stage(), test=test)

    def test_a_failed_step_breaks_its_session_only(self) -> None:
        first, second = counting_stage(), counting_stage()
        model = second.model
        assert isinstance(model, AddingModel)

        async def test(s: Swarm) -> None:
            good, bad = [await s.client().open(s.route(*TWO)) for _ in range(2)]
            model.failing[bad.id] = RuntimeError("bad luck")
            with pytest.raises(StepFailed, match="RuntimeError: bad luck"):
                await bad.step(counting_rows(1), {0: (0, 1)})
            model.failing.clear()
            with pytest.raises(StepFailed, match="step 1 failed .* starts anew in the next epoch"):
                await bad.step(counting_rows(1), {0: (1, 1)})
            assert (await good.step(counting_rows(1), {0: (0, 1)}))[:, 0].tolist() == [4]

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


def test_closing_with_steps_in_flight() -> None:
    async def test(s: Swarm) -> None:
        session = await s.client().open(s.route(*TWO))
        await session.send(session.message(counting_rows(40), {0: (0, 40)}), counting_rows(40))
        for link in session.links:
            await link.send(Close(session.id))
        for link in session.links:
            while (received := await link.receive(5.0)) is not None:
                if isinstance(received[0], Closed):
                    break
            assert received is not None
        assert await s.free_tokens() == [1000, 1000]

    run(counting_stage(), counting_stage(), test=test)
