"""What a transport is: streams of byte frames between two ends. No messages here.

Implementations: `grpc` (direct, TLS) and `memory` (tests: seeded faults). Both
keep this contract to the letter, and one test suite runs over both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer listens: `host:port`, its id, and the hash of its certificate.

    `certificate_hash` is the SHA-256 of the DER certificate; the dialer refuses
    any other certificate. The memory transport leaves it empty.
    """

    peer: str
    address: str
    certificate_hash: bytes = b""


@dataclass(slots=True)
class StreamCounters:
    """Bytes and frames (payload of frames, keep-alives not counted) of one stream."""

    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Stream(Protocol):
    """A bidirectional stream of frames, in order, each delivered whole."""

    counters: StreamCounters

    @property
    def remote(self) -> str:
        """The other end, for messages and logs."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send one frame made of `parts` joined; waits while the other side is slow.

        Raises TransportError when the stream is broken or closed.
        """
        ...

    async def receive(self) -> bytes | None:
        """The next frame, or None when the other side has closed cleanly.

        Raises TransportError when the stream broke.
        """
        ...

    async def close(self) -> None:
        """End the stream: the other side reads what was sent, then None. Never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one accepted stream; the stream ends when it returns."""


class Listener(Protocol):
    """Accepts streams."""

    @property
    def address(self) -> str:
        """`host:port` actually bound."""
        ...

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept; each stream runs `handler` in a task of its own."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to `grace_s` for handlers, then cancel them."""
        ...


class Dialer(Protocol):
    """Opens streams; connections to one endpoint are shared."""

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        """A new stream to `endpoint`.

        Raises TransportError (refused, unreachable), DeadlineExceeded, or
        AuthError when the certificate is not the one the endpoint names.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Enforced before allocation."""

    max_frame_bytes: int = 64 << 20
    keepalive_s: float = 0.1
    keepalive_after_s: float = 10.0
