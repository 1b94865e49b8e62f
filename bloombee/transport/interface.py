"""What a transport is: streams of byte frames between two ends. No messages here.

Implementations: `direct` (gRPC, TLS), `p2p` (libp2p, where no direct way leads) and
`memory` (tests: seeded faults). All keep this contract; one test suite runs over
`direct` and `memory`.

Frames of one zero byte (keep-alive: it holds a connection's congestion window
open) and of two (end of stream) are the transport's own: `send` refuses them and no
`receive` returns them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview

KEEP_ALIVE = b"\x00"
END = b"\x00\x00"


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
    """A bidirectional stream of frames, in order, each delivered whole.

    Any task may send; one at a time receives. A cancelled `send` has queued its
    frame or not, a cancelled `receive` loses nothing: the stream stays whole.
    """

    counters: StreamCounters

    @property
    def remote(self) -> str:
        """The other end, for messages and logs."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send one frame made of `parts` joined; waits while the other side is slow.

        `parts` may be changed as soon as it returns. Raises TransportError when
        the stream is broken or either side has closed it, RequestError when the
        frame is over our limit or is one of the transport's own.
        """
        ...

    async def receive(self) -> bytes | None:
        """The next frame, or None when either side has closed cleanly.

        Raises TransportError when the stream broke; a frame over the limit breaks
        it before the frame is allocated (the side that can tell why raises
        ProtocolError).
        """
        ...

    async def close(self) -> None:
        """End the stream: the other side reads what was sent, then None. Never raises.

        Waits for a slow reader up to `TransportLimits.linger_s`, then breaks the
        stream. Frames that we have not received are lost.
        """
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one accepted stream; the stream is closed when it returns, broken when it raises."""


class Listener(Protocol):
    """Accepts streams."""

    @property
    def address(self) -> str:
        """`host:port` actually bound."""
        ...

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept; each stream runs `handler` in a task of its own.

        Raises SettingsError when the address can't be listened on.
        """
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
    """Enforced before allocation.

    `queue_bytes`: how much one stream buffers in each direction before `send` waits.
    Keep-alives go every `keepalive_s` on a connection over which we have sent a
    frame of `keepalive_from_bytes` or more, until `keepalive_after_s` after our
    last frame: what fits the initial window needs none. A connection without streams
    is closed after `idle_s`.
    """

    max_frame_bytes: int = 64 << 20
    queue_bytes: int = 4 << 20
    linger_s: float = 5.0
    idle_s: float = 60.0
    keepalive_s: float = 0.1
    keepalive_after_s: float = 10.0
    keepalive_from_bytes: int = 4096
