"""Every transport, made alike, and handlers to serve streams with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from bloombee.transport import certificates
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.interface import (
    Dialer,
    Endpoint,
    Listener,
    Stream,
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
