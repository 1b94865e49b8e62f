"""Limits, refusals and deadlines of every transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest

from bloombee.errors import (
    AuthError,
    BloomBeeError,
    DeadlineExceeded,
    ProtocolError,
    RequestError,
    SettingsError,
    TransportError,
)
from bloombee.transport import certificates
from bloombee.transport.direct import DirectListener
from bloombee.transport.interface import (
    END,
    KEEP_ALIVE,
    Endpoint,
    Listener,
    Stream,
)
from tests.transports import LIMITS, PEER, Memory, Serving, Transport, echo, run


def test_a_cancelled_receive_or_send_leaves_the_stream_whole(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            for number in range(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.005):
                        await stream.receive()
                await stream.send([b"%d" % number])
                assert await stream.receive() == b"%d" % number

    run(main)


def test_a_cancelled_send_is_sent_whole_or_not_at_all(serving: Serving) -> None:
    go, done = asyncio.Event(), asyncio.Event()
    received: list[bytes] = []

    async def slow(stream: Stream) -> None:
        await go.wait()
        while (frame := await stream.receive()) is not None:
            received.append(frame)
        done.set()

    async def main() -> None:
        async with serving(slow) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            sent: list[int] = []
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    for number in range(10_000):
                        await stream.send([number.to_bytes(4, "big") * (1 << 14)])
                        sent.append(number)
            go.set()
            await stream.send([b"last"])
            await stream.close()
            await done.wait()
            assert received.pop() == b"last"
            assert [int.from_bytes(frame[:4], "big") for frame in received] == sent

    run(main)


def test_frames_over_our_own_limit_are_refused_before_they_leave(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            with pytest.raises(RequestError, match="1048577"):
                await stream.send([bytes(1 << 20), b"x"])
            for reserved in (KEEP_ALIVE, END):
                with pytest.raises(RequestError, match="transport's own"):
                    await stream.send([reserved])
            await stream.send([b"still here"])
            assert await stream.receive() == b"still here"

    run(main)


@pytest.mark.parametrize("who", ["server", "client"])
def test_frames_over_the_receivers_limit_break_the_stream(serving: Serving, who: str) -> None:
    small = replace(LIMITS, max_frame_bytes=1000)
    heard: list[BaseException | bytes | None] = []

    async def talk(stream: Stream) -> None:
        try:
            heard.append(await stream.receive())
            await stream.send([bytes(2000)])
            heard.append(await stream.receive())
        except BloomBeeError as error:
            heard.append(error)
            raise

    async def main() -> None:
        async with serving(talk, **{who: small}) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            with pytest.raises((ProtocolError, TransportError)) as caught:
                await stream.send([bytes(2000 if who == "server" else 10)])
                while await stream.receive() is not None:
                    pass
            assert "limit" in str(caught.value)
            await asyncio.sleep(0.1)
            assert isinstance(heard[-1], ProtocolError | TransportError)
            assert bytes(2000) not in heard

    run(main)


def test_dialing_nobody_is_refused(transport: Transport) -> None:
    async def main() -> None:
        dialer = transport.dialer(LIMITS)
        with pytest.raises(TransportError, match=transport.nobody().address):
            await dialer.dial(transport.nobody(), 5.0)
        await dialer.close()

    run(main)


def test_a_wrong_certificate_or_peer_is_an_auth_error(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            for wrong in (
                replace(endpoint, certificate_hash=bytes(31) + b"x"),
                replace(endpoint, peer="12D3KooWOther"),
            ):
                with pytest.raises(AuthError):
                    await dialer.dial(wrong, 5.0)
            # The right one still works.
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"hello"])
            assert await stream.receive() == b"hello"

    run(main)


def test_a_stopped_listener_refuses_and_a_new_one_at_its_address_is_found(
    transport: Transport,
) -> None:
    async def main() -> None:
        listener, endpoint = transport.listener(LIMITS)
        dialer = transport.dialer(LIMITS)
        await listener.start(echo)
        stream = await dialer.dial(endpoint(), 5.0)
        await listener.stop(0.0)
        with pytest.raises(TransportError):
            await stream.receive()
        for _ in range(3):
            with pytest.raises(TransportError):
                await dialer.dial(endpoint(), 5.0)
        await listener.start(echo)
        again = await dialer.dial(endpoint(), 5.0)
        await again.send([b"back"])
        assert await again.receive() == b"back"
        await dialer.close()
        await listener.stop(0.0)

    run(main)


def test_stop_lets_handlers_finish_within_the_grace(transport: Transport) -> None:
    ends: list[str] = []

    async def handler(stream: Stream) -> None:
        wait_s = float((await stream.receive() or b"0").decode())
        try:
            await asyncio.sleep(wait_s)
            await stream.send([b"result"])
            ends.append("finished")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def main() -> None:
        listener, endpoint = transport.listener(LIMITS)
        dialer = transport.dialer(LIMITS)
        await listener.start(handler)
        quick, slow = await dialer.dial(endpoint(), 5.0), await dialer.dial(endpoint(), 5.0)
        await quick.send([b"0.2"])
        await slow.send([b"30"])
        await asyncio.sleep(0.1)
        started = asyncio.get_running_loop().time()
        await listener.stop(1.0)
        assert asyncio.get_running_loop().time() - started < 4.0
        assert await quick.receive() == b"result"
        with pytest.raises(TransportError):
            await slow.receive()
        assert ends == ["finished", "cancelled"]
        await dialer.close()

    run(main)


def test_an_address_in_use_is_a_settings_error(transport: Transport) -> None:
    async def main() -> None:
        listener, endpoint = transport.listener(LIMITS)
        await listener.start(echo)
        host, _, port = endpoint().address.rpartition(":")
        other: Listener
        if isinstance(transport, Memory):
            other = transport.network.listener("other", endpoint().address)
        else:
            other = DirectListener(host, int(port), certificates.create("other"))
        with pytest.raises(SettingsError, match=endpoint().address):
            await other.start(echo)
        await listener.stop(0.0)

    run(main)


def test_a_dial_that_nobody_answers_ends_at_its_deadline(transport: Transport) -> None:
    async def main() -> None:
        dialer = transport.dialer(LIMITS)
        with contextlib.ExitStack() as stack:
            if isinstance(transport, Memory):
                transport.network.partition(["client"], [PEER])
                endpoint = transport.nobody()
            else:
                # The kernel accepts, nobody speaks TLS.
                silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                endpoint = Endpoint(PEER, f"127.0.0.1:{silent.getsockname()[1]}", bytes(32))
            started = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded, match=endpoint.address):
                await dialer.dial(endpoint, 0.3)
            assert asyncio.get_running_loop().time() - started < 2.0
            await dialer.close()

    run(main)
