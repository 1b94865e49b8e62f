"""How sessions are opened and stages attached, over stages that only count."""

from __future__ import annotations

import msgspec
import pytest

from bloombee.errors import (
    AuthError,
    BloomBeeError,
    HopLost,
    KVFull,
    ProtocolError,
    RequestError,
    StaleEpoch,
)
from bloombee.protocol.messages import (
    Attach,
    Attached,
    Close,
    Closed,
    Open,
    Opened,
)
from bloombee.server.validation import Limits
from tests.swarm.harness import (
    TWO,
    Swarm,
    counting_rows,
    counting_stage,
    expect,
    run,
)


class TestOpening:
    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"fingerprint": "other"}, RequestError),
            ({"start": 3, "end": 9}, RequestError),
            ({"sequences": 17}, RequestError),
            ({"max_length": 501}, RequestError),
            ({"stages": 0}, RequestError),
            ({"sequences": 3, "max_length": 400}, RequestError),
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
            with pytest.raises(KVFull, match="a peer may hold 2 sessions"):
                await client.open(s.route())
            sessions.append(await s.client().open(s.route()))
            with pytest.raises(KVFull, match="holds its 3 sessions"):
                await s.client().open(s.route())
            for session in sessions:
                await session.close()
            await client.open(s.route())

        limits = Limits(max_sessions=3, max_sessions_per_peer=2)
        run(counting_stage(limits=limits), test=test)

    def test_an_id_can_be_open_once(self) -> None:
        async def test(s: Swarm) -> None:
            client, other = s.client(), s.client()
            session = await client.open(s.route(), epoch=1)
            for opener, epoch, error in (
                (client, 0, StaleEpoch),
                (client, 1, RequestError),
                (other, 1, RequestError),
                (other, 2, RequestError),
            ):
                link = await opener.connect(s.stages[0])
                await link.send(Open(session.id, bytes(16), epoch, "tiny", 0, 4, 1, 50, "float32"))
                with pytest.raises(error) as caught:
                    await expect(link, Opened)
                assert type(caught.value) is error
            again = Open(session.id, bytes(16), 0, "tiny", 0, 4, 1, 50, "float32")
            await session.links[0].send(again)
            with pytest.raises(StaleEpoch):
                await expect(session.links[0], Opened)

        run(counting_stage(), test=test)

    def test_an_unreachable_next_stage_is_named_once_the_session_is_open(self) -> None:
        async def test(s: Swarm) -> None:
            route = s.route(*TWO)
            s.network.kill(route[1].server.endpoint.peer)
            link = await s.client().connect(s.stages[0])
            opening = Open(
                bytes(16), bytes(16), 0, "tiny", 0, 2, 1, 50, "float32", next=route[1].hop
            )
            await link.send(opening)
            await expect(link, Opened)
            with pytest.raises(HopLost, match=route[1].hop.address):
                await expect(link, Opened)
            await link.send(Close(bytes(16)))
            await expect(link, Closed)
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
            await session.step(counting_rows(1), {0: (0, 1)})
            link = await s.client().connect(s.stages[1])
            await link.send(Attach(session.id, session.secret, 0))
            with pytest.raises(ProtocolError, match="elsewhere"):
                await expect(link, Attached)
            await session.send(
                session.message(counting_rows(1), {0: (1, 1)}), counting_rows(1), stage=1
            )
            with pytest.raises(ProtocolError, match="stage before"):
                await session.output()
            await session.step(counting_rows(1), {0: (1, 1)})
            link = await s.client().connect(s.stages[0])
            await link.send(Attach(session.id, session.secret, 0))
            with pytest.raises(ProtocolError, match="elsewhere"):
                await expect(link, Attached)

        run(counting_stage(), counting_stage(), test=test)
