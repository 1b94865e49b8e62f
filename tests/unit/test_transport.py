"""One suite over every transport: what `transport/interface.py` promises, they keep."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.interface import (
    END,
    KEEP_ALIVE,
    Dialer,
    Endpoint,
    Listener,
    Stream,
    StreamHandler,
    TransportLimits,
)
from bloombee.transport.memory import MemoryNetwork

LIMITS = TransportLimits(max_frame_bytes=1 << 20, queue_bytes=1 << 16, linger_s=1.0)
PEER = "12D3KooWServer"


class Transport:
    """Makes listeners and dialers of one kind."""

    def listener(self, limits: TransportLimits) -> tuple[Listener, Callable[[], Endpoint]]:
        raise AssertionError

    def dialer(self, limits: TransportLimits) -> Dialer:
        raise AssertionError

    def nobody(self) -> Endpoint:
        """An endpoint where nobody listens."""
        raise AssertionError


class Memory(Transport):
    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def listener(self, limits: TransportLimits) -> tuple[Listener, Callable[[], Endpoint]]:
        made = self.network.listener(PEER, limits=limits)
        return made, lambda: made.endpoint

    def dialer(self, limits: TransportLimits) -> Dialer:
        return self.network.dialer("client", limits=limits)

    def nobody(self) -> Endpoint:
        return Endpoint(PEER, "memory:404")


class Direct(Transport):
    def listener(self, limits: TransportLimits) -> tuple[Listener, Callable[[], Endpoint]]:
        made = DirectListener("127.0.0.1", 0, certificates.create(PEER), limits)
        return made, lambda: made.endpoint

    def dialer(self, limits: TransportLimits) -> Dialer:
        return DirectDialer(limits)

    def nobody(self) -> Endpoint:
        return Endpoint(PEER, "127.0.0.1:9", bytes(32))


Serving = Callable[..., AbstractAsyncContextManager[tuple[Dialer, Endpoint]]]


@pytest.fixture(params=[Memory, Direct])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param()


@pytest.fixture
def serving(transport: Transport) -> Serving:
    @asynccontextmanager
    async def start(
        handler: StreamHandler,
        *,
        server: TransportLimits = LIMITS,
        client: TransportLimits = LIMITS,
    ) -> AsyncIterator[tuple[Dialer, Endpoint]]:
        listener, endpoint = transport.listener(server)
        dialer = transport.dialer(client)
        await listener.start(handler)
        try:
            yield dialer, endpoint()
        finally:
            await dialer.close()
            await listener.stop(0.0)

    return start


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30.0):
            await main()

    asyncio.run(bounded())


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send([frame])


async def hold(stream: Stream) -> None:
    """Neither read nor close."""
    await asyncio.sleep(60.0)


def test_frames_arrive_whole_in_order_and_counted(serving: Serving) -> None:
    sizes = [0, 1, 2, 3, 100, 70_000, 1 << 20, 5]

    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            frames = [bytes([65 + index]) * size for index, size in enumerate(sizes)]

            async def send_all() -> None:
                for frame in frames:
                    half = len(frame) // 2
                    await stream.send([frame[:half], memoryview(frame)[half:], bytearray()])

            async with asyncio.TaskGroup() as group:
                group.create_task(send_all())
                for frame in frames:
                    assert await stream.receive() == frame
            counters = stream.counters
            assert (counters.frames_sent, counters.bytes_sent) == (len(sizes), sum(sizes))
            assert (counters.frames_received, counters.bytes_received) == (len(sizes), sum(sizes))

    run(main)


def test_a_sent_buffer_may_be_changed_at_once(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            buffer = bytearray(b"before")
            await stream.send([buffer])
            buffer[:] = b"after!"
            assert await stream.receive() == b"before"

    run(main)


def test_many_streams_of_one_dialer_do_not_mix(serving: Serving) -> None:
    async def main() -> None:
        async with serving(echo) as (dialer, endpoint):

            async def talk(name: int) -> None:
                stream = await dialer.dial(endpoint, 5.0)
                for count in range(20):
                    frame = f"{name}:{count}".encode()
                    await stream.send([frame])
                    assert await stream.receive() == frame
                await stream.close()

            async with asyncio.TaskGroup() as group:
                for name in range(8):
                    group.create_task(talk(name))

    run(main)


def test_a_slow_reader_holds_the_sender_back_and_gets_everything(serving: Serving) -> None:
    frame, count = bytes(1 << 16), 400  # 25 MB: more than all buffers on the way
    go, done = asyncio.Event(), asyncio.Event()
    received: list[int] = []

    async def slow(stream: Stream) -> None:
        await go.wait()
        while (got := await stream.receive()) is not None:
            received.append(len(got))
        done.set()

    async def main() -> None:
        async with serving(slow) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for _ in range(count):
                    await stream.send([frame])
                    sent += 1

            async with asyncio.TaskGroup() as group:
                group.create_task(send_all())
                await asyncio.sleep(0.5)
                stuck = sent
                await asyncio.sleep(0.2)
                assert stuck == sent < count
                go.set()
            await stream.close()
            await done.wait()
            assert received == [len(frame)] * count

    run(main)


def test_close_delivers_what_was_sent_then_none(serving: Serving) -> None:
    heard: list[bytes | None] = []
    ended = asyncio.Event()

    async def listen(stream: Stream) -> None:
        await asyncio.sleep(0.05)
        heard.extend([await stream.receive(), await stream.receive(), await stream.receive()])
        heard.append(await stream.receive())
        with pytest.raises(TransportError, match="closed"):
            await stream.send([b"too late"])
        ended.set()

    async def main() -> None:
        async with serving(listen) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"one"])
            await stream.send([b"two"])
            await stream.close()
            await stream.close()
            with pytest.raises(TransportError, match="closed"):
                await stream.send([b"three"])
            assert await stream.receive() is None
            await ended.wait()
            assert heard == [b"one", b"two", None, None]

    run(main)


def test_a_handler_that_returns_closes_the_stream_after_its_frames(serving: Serving) -> None:
    async def speak(stream: Stream) -> None:
        for number in range(50):
            await stream.send([b"%d" % number])

    async def main() -> None:
        async with serving(speak) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await asyncio.sleep(0.05)
            frames: list[bytes] = []
            while (frame := await stream.receive()) is not None:
                frames.append(frame)
            assert frames == [b"%d" % number for number in range(50)]
            assert await stream.receive() is None
            with pytest.raises(TransportError, match="closed"):
                await stream.send([b"late"])

    run(main)


def test_close_by_the_listener_ends_the_stream_while_its_handler_runs(serving: Serving) -> None:
    async def early(stream: Stream) -> None:
        await stream.send([b"bye"])
        await stream.close()
        assert await stream.receive() is None
        await asyncio.sleep(60.0)

    async def main() -> None:
        async with serving(early) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            assert await stream.receive() == b"bye"
            assert await stream.receive() is None

    run(main)


def test_close_wakes_our_own_receive_and_send(serving: Serving) -> None:
    async def main() -> None:
        async with serving(hold) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(stream.receive())
                await asyncio.sleep(0.05)
                await stream.close()
            assert reading.result() is None

            stuck = await dialer.dial(endpoint, 5.0)

            async def send_for_ever() -> None:
                while True:
                    await stuck.send([bytes(1 << 16)])

            async def expect_refusal() -> None:
                with pytest.raises(TransportError):
                    await send_for_ever()

            async with asyncio.TaskGroup() as group:
                group.create_task(expect_refusal())
                await asyncio.sleep(0.3)
                # The reader never reads: this lingers, then breaks the stream.
                started = asyncio.get_running_loop().time()
                await stuck.close()
                assert asyncio.get_running_loop().time() - started < LIMITS.linger_s + 1.0

    run(main)


@pytest.mark.parametrize("error", [TransportError("next hop is gone"), ProtocolError("nonsense")])
def test_a_handler_that_raises_breaks_the_stream(serving: Serving, error: BloomBeeError) -> None:
    async def fail(stream: Stream) -> None:
        await stream.receive()
        raise error

    async def main() -> None:
        async with serving(fail) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"go"])
            with pytest.raises(TransportError):
                await stream.receive()
            with pytest.raises(TransportError):
                await stream.send([b"more"])
            # Others are served on.
            assert await (await dialer.dial(endpoint, 5.0)).send([b"go"]) is None

    run(main)


def test_a_handler_that_raises_ends_a_sender_it_never_read(serving: Serving) -> None:
    async def fail(stream: Stream) -> None:
        await asyncio.sleep(0.3)
        raise ProtocolError("enough")

    async def main() -> None:
        async with serving(fail) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            with pytest.raises(TransportError):
                while True:
                    await stream.send([bytes(1 << 16)])

    run(main)


def test_a_handler_stuck_in_send_can_fail(serving: Serving) -> None:
    async def flood(stream: Stream) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    await stream.send([bytes(1 << 16)])
        raise ProtocolError("the reader sleeps")

    async def main() -> None:
        async with serving(flood) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await asyncio.sleep(0.6)
            with pytest.raises(TransportError):
                while await stream.receive() is not None:
                    pass

    run(main)


def test_a_dialer_that_closes_breaks_its_streams_for_the_listener(serving: Serving) -> None:
    outcome: list[BaseException | bytes | None] = []
    ended = asyncio.Event()

    async def listen(stream: Stream) -> None:
        try:
            outcome.append(await stream.receive())
            outcome.append(await stream.receive())
        except BloomBeeError as error:
            outcome.append(error)
        ended.set()

    async def main() -> None:
        async with serving(listen) as (dialer, endpoint):
            stream = await dialer.dial(endpoint, 5.0)
            await stream.send([b"hello"])
            await asyncio.sleep(0.1)
            await dialer.close()
            with pytest.raises(TransportError):
                await stream.receive()
            await ended.wait()
            assert outcome[0] == b"hello"
            assert isinstance(outcome[1], TransportError)
            with pytest.raises(TransportError, match="closed"):
                await dialer.dial(endpoint, 5.0)

    run(main)


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
