"""Connections over the memory transport: handshake, refusals, and order of messages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from bloombee.core import SessionId
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    DeadlineExceeded,
    KVFull,
    ProtocolError,
    TransportError,
    VersionMismatch,
)
from bloombee.protocol import failures, framing, handshake
from bloombee.protocol import messages as m
from bloombee.protocol.machine import State
from bloombee.swarm.connection import Connection, ConnectionSettings, accept, connect
from bloombee.swarm.identity import Identity
from bloombee.transport.links import LinkShape
from bloombee.transport.memory import MemoryNetwork
from tests.virtual_time import run

if TYPE_CHECKING:
    from bloombee.transport.interface import Endpoint, Stream

SESSION = SessionId(b"s" * 16)
OPEN = m.Open(SESSION, b"x" * 16, 0, "print", 0, 4, 1, 64, "float32")
OPENED = m.Opened(SESSION, 0, (0,), 1000, 512)
STEP = m.Step(SESSION, 0, 1, "decode", (0,), (0,), (1,), m.Payload("rows", "float32", 1, 2))
OUTPUT = m.Output(SESSION, 0, 1, m.Payload("rows", "float32", 1, 2))

Serve = Callable[[Connection], Awaitable[None]]


@dataclasses.dataclass
class World:
    """One server and one client on an emulated network."""

    network: MemoryNetwork
    endpoint: Endpoint
    client: Identity
    accepted: list[BloomBeeError | str]

    async def connect(self, **settings: object) -> Connection:
        chosen = dataclasses.replace(ConnectionSettings(), **settings)
        dialer = self.network.dialer(self.client.peer_id)
        return await connect(dialer, self.endpoint, self.client, settings=chosen)


async def world(
    serve: Serve, *, link: LinkShape | None = None, shown: bytes = b"", **settings: object
) -> World:
    """`shown` is the certificate hash the server believes it shows."""
    network = MemoryNetwork(link=link)
    server = Identity.load_or_create(None)
    accepted: list[BloomBeeError | str] = []

    async def handler(stream: Stream) -> None:
        chosen = dataclasses.replace(ConnectionSettings(), **settings)
        try:
            connection = await accept(stream, server, shown, settings=chosen)
        except BloomBeeError as error:
            accepted.append(error)
            raise
        accepted.append(connection.remote)
        await serve(connection)

    listener = network.listener(server.peer_id)
    await listener.start(handler)
    return World(network, listener.endpoint, Identity.load_or_create(None), accepted)


async def echo(connection: Connection) -> None:
    """A server that opens every session and answers each step with its payload."""
    while (received := await connection.receive()) is not None:
        message, payload = received
        match message:
            case m.Open():
                await connection.send(OPENED)
            case m.Step():
                await connection.send(OUTPUT, bytes(payload))
            case m.Close():
                await connection.send(m.Closed(message.session))
            case _:
                raise AssertionError(message)


def test_a_session_over_a_slow_link_costs_one_round_trip_to_connect() -> None:
    async def main() -> None:
        here = await world(echo, link=LinkShape(delay_s=0.05))
        loop = asyncio.get_running_loop()
        connection = await here.connect()
        # The challenge comes with the answer to the dial.
        assert loop.time() == pytest.approx(0.1)
        assert connection.remote == here.endpoint.peer
        await connection.send(OPEN)
        assert await connection.receive() == (OPENED, b"")
        assert loop.time() == pytest.approx(0.2)
        await connection.send(STEP, b"12345678")
        assert await connection.receive() == (OUTPUT, b"12345678")
        await connection.send(m.Close(SESSION))
        assert await connection.receive() == (m.Closed(SESSION), b"")
        assert connection.state is State.OVER
        assert here.accepted == [here.client.peer_id]
        await connection.close()

    run(main())


@pytest.mark.parametrize(
    ("server", "client", "error", "says"),
    [
        ({"swarm_key": b"k"}, {}, AuthError, "private"),
        ({"swarm_key": b"k"}, {"swarm_key": b"other"}, AuthError, "wrong swarm key"),
        ({}, {"swarm_key": b"k"}, AuthError, "public"),
        ({"shown": b"certificate"}, {}, AuthError, "certificate"),
    ],
)
def test_a_refused_hello_is_the_first_thing_the_client_hears(
    server: dict[str, object], client: dict[str, object], error: type[BloomBeeError], says: str
) -> None:
    async def main() -> None:
        here = await world(echo, **server)  # type: ignore[arg-type]
        connection = await here.connect(**client)
        await connection.send(OPEN)
        with pytest.raises(error, match=says):
            await connection.receive()
        assert [type(each) for each in here.accepted] == [error]

    run(main())


def test_the_right_swarm_key_is_let_in() -> None:
    async def main() -> None:
        here = await world(echo, swarm_key=b"k")
        connection = await here.connect(swarm_key=b"k")
        await connection.send(OPEN)
        assert await connection.receive() == (OPENED, b"")

    run(main())


def test_a_skewed_client_learns_by_how_much() -> None:
    async def main() -> None:
        here = await world(echo, now=lambda: 1000.0)
        with pytest.raises(AuthError, match="300 s behind"):
            await here.connect(now=lambda: 1300.0)
        connection = await here.connect(now=lambda: 1100.0)
        await connection.send(OPEN)
        assert await connection.receive() == (OPENED, b"")

    run(main())


def test_a_signature_by_another_key_is_refused() -> None:
    @dataclasses.dataclass
    class Impostor:
        peer_id: str
        public_key: bytes
        sign: Callable[[bytes], bytes]

    async def main() -> None:
        here = await world(echo)
        victim, thief = here.client, Identity.load_or_create(None)
        for public_key in (victim.public_key, thief.public_key):
            here.client = Impostor(victim.peer_id, public_key, thief.sign)  # type: ignore[assignment]
            connection = await here.connect()
            with pytest.raises(AuthError, match="signature"):
                await connection.receive()

    run(main())


def test_another_peer_at_the_address_is_refused_by_the_client() -> None:
    async def main() -> None:
        here = await world(echo)
        here.endpoint = dataclasses.replace(here.endpoint, peer="somebody-else")
        with pytest.raises(AuthError, match="somebody-else"):
            await here.connect()

    run(main())


async def raw_server(network: MemoryNetwork, frames: list[bytes]) -> Endpoint:
    """A server that says `frames` and waits until the client has gone."""

    async def handler(stream: Stream) -> None:
        for frame in frames:
            await stream.send([frame])
        while await stream.receive() is not None:
            pass

    listener = network.listener("server")
    await listener.start(handler)
    return listener.endpoint


def frame_of(message: m.AnyMessage) -> bytes:
    return b"".join(framing.encode(message))


def challenge(**changes: object) -> m.Challenge:
    good = m.Challenge(handshake.VERSIONS, "server", bytes(16), 1000.0)
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize(
    ("frames", "error", "says"),
    [
        ([frame_of(challenge(versions=(7, 8)))], VersionMismatch, "7, 8"),
        ([frame_of(challenge(versions=()))], VersionMismatch, "none"),
        ([frame_of(challenge(peer="relay"))], AuthError, "relay"),
        ([frame_of(challenge(time_s=float("nan")))], ProtocolError, "nan"),
        ([frame_of(failures.to_message(KVFull("0 free")))], KVFull, "0 free"),
        ([frame_of(OPENED)], ProtocolError, "out of order"),
        ([b"\x07garbage"], ProtocolError, "truncated"),
    ],
)
def test_bad_first_words_of_a_server(
    frames: list[bytes], error: type[BloomBeeError], says: str
) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        endpoint = await raw_server(network, frames)
        settings = ConnectionSettings(now=lambda: 1000.0)
        identity = Identity.load_or_create(None)
        with pytest.raises(error, match=says):
            await connect(network.dialer("me"), endpoint, identity, settings=settings)

    run(main())


def test_silence_ends_at_the_deadline_on_both_sides() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        endpoint = await raw_server(network, [])
        identity = Identity.load_or_create(None)
        settings = ConnectionSettings(deadline_s=3.0)
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceeded, match="3 s"):
            await connect(network.dialer("me"), endpoint, identity, settings=settings)
        assert loop.time() == pytest.approx(3.0)

        here = await world(echo, deadline_s=2.0)
        stream = await here.network.dialer("mute").dial(here.endpoint, 1.0)
        while await stream.receive() is not None:
            pass
        assert [type(each) for each in here.accepted] == [DeadlineExceeded]
        assert loop.time() == pytest.approx(5.0)

    run(main())


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([b"\x01"], ProtocolError),
        ([frame_of(OPEN)], ProtocolError),
        ([frame_of(m.Hello(99, "me", b"", 0.0, b""))], VersionMismatch),
        ([frame_of(m.Hello(1, "", b"", 1e12, b""))], AuthError),
        ([frame_of(m.Hello(1, "me", b"", 1000.0, b""))], AuthError),
    ],
)
def test_bad_first_words_of_a_client_are_answered_and_leave_the_server_serving(
    frames: list[bytes], error: type[BloomBeeError]
) -> None:
    async def main() -> None:
        here = await world(echo, now=lambda: 1000.0)
        stream = await here.network.dialer("bad").dial(here.endpoint, 1.0)
        for frame in frames:
            await stream.send([frame])
        heard: list[m.AnyMessage] = []
        while (frame := await stream.receive()) is not None:
            decoded = framing.decode(frame)
            assert decoded is not None
            heard.append(decoded[0])
        assert isinstance(heard[0], m.Challenge)
        assert isinstance(heard[1], m.Failed)
        assert type(failures.to_error(heard[1])) is error
        assert [type(each) for each in here.accepted] == [error]
        connection = await here.connect(now=lambda: 1000.0)
        await connection.send(OPEN)
        assert await connection.receive() == (OPENED, b"")

    run(main())


def test_a_message_out_of_order_is_refused_before_it_is_sent_and_when_received() -> None:
    async def main() -> None:
        here = await world(echo)
        connection = await here.connect()
        with pytest.raises(ProtocolError, match="Step sent out of order"):
            await connection.send(STEP, b"12345678")
        # The refusal has changed nothing.
        await connection.send(OPEN)
        assert await connection.receive() == (OPENED, b"")

        stray = await here.connect()
        stray._machine.state = State.SESSION
        await stray.send(STEP, b"12345678")
        with pytest.raises(TransportError):
            await stray.receive()

    run(main())


def test_a_failed_session_is_a_message_and_the_stream_lives_on() -> None:
    async def refuse_once(connection: Connection) -> None:
        await connection.receive()
        await connection.send(failures.to_message(KVFull("3 free"), session=SESSION))
        await echo(connection)

    async def main() -> None:
        here = await world(refuse_once)
        connection = await here.connect()
        await connection.send(OPEN)
        received = await connection.receive()
        assert received is not None
        message = received[0]
        assert isinstance(message, m.Failed)
        assert isinstance(failures.to_error(message), KVFull)
        await connection.send(OPEN)
        assert await connection.receive() == (OPENED, b"")

    run(main())


def test_a_receive_past_its_deadline_loses_nothing() -> None:
    async def slow(connection: Connection) -> None:
        await connection.receive()
        await asyncio.sleep(5.0)
        await connection.send(OPENED)
        await connection.receive()

    async def main() -> None:
        here = await world(slow)
        connection = await here.connect()
        await connection.send(OPEN)
        with pytest.raises(DeadlineExceeded, match=here.endpoint.peer):
            await connection.receive(deadline_s=1.0)
        assert await connection.receive(deadline_s=10.0) == (OPENED, b"")

    run(main())
