"""The two ends of one gRPC call as wires, and gRPC's errors as ours.

A client that closes says so in a last frame, since a server can't tell the end
of a client's writing from a broken connection; a server's end is told by status.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from bloombee.errors import AuthError, BloomBeeError, ProtocolError, Refused, TransportError
from bloombee.transport.interface import END

if TYPE_CHECKING:
    from collections.abc import Awaitable

    Call = grpc.aio.StreamStreamCall[bytes, bytes]
    Context = grpc.aio.ServicerContext[bytes, bytes]

SERVICE = "bloombee.Stream"
METHOD = "Open"

# What aio raises when a call ended before or during an operation.
_ENDED = (
    grpc.RpcError,
    grpc.aio.AbortError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)
_EOF: object = vars(grpc.aio)["EOF"]  # missing from gRPC's type stubs


class ClientWire:
    """The dialer's end."""

    def __init__(self, call: Call, remote: str) -> None:
        self._call = call
        self._remote = remote

    @property
    def remote(self) -> str:
        """The address dialed."""
        return self._remote

    async def read(self) -> bytes | None:
        """The next frame, or None when the server has ended the call in order."""
        try:
            frame: object = await self._call.read()
        except _ENDED:
            frame = _EOF
        if isinstance(frame, bytes):
            return frame
        if (error := await failure(self._call, self._remote)) is not None:
            raise error
        return None

    async def write(self, frame: bytes) -> None:
        """Send one frame."""
        try:
            await self._call.write(frame)
        except _ENDED:
            raise await self._ended() from None

    async def finish(self) -> None:
        """Say that nothing follows; the server's end is still to come."""
        try:
            await self._call.write(END)
            await self._call.done_writing()
        except _ENDED:
            raise await self._ended() from None

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    async def _ended(self) -> BloomBeeError:
        error = await failure(self._call, self._remote)
        return error or TransportError(f"{self._remote} has closed the stream")


class ServerWire:
    """The listener's end; it ends when the method that serves the call returns."""

    def __init__(self, context: Context) -> None:
        self.cancelled = False
        self._context = context
        self._remote = context.peer()
        self._serving = asyncio.current_task()

    @property
    def remote(self) -> str:
        """The client's address and port."""
        return self._remote

    async def read(self) -> bytes | None:
        """The next frame, or None when the client has closed in order."""
        frame = await self._guarded(self._context.read())
        if not isinstance(frame, bytes):
            raise TransportError(f"the connection to {self._remote} broke")
        return None if frame == END else frame

    async def write(self, frame: bytes) -> None:
        """Send one frame."""
        await self._guarded(self._context.write(frame))

    async def finish(self) -> None:
        """Nothing to say: returning ends the call."""

    def cancel(self) -> None:
        """End the method that serves the call, even when it waits for a slow reader."""
        if self._serving is not None and not self._serving.done() and not self.cancelled:
            self.cancelled = True
            self._serving.cancel()

    async def _guarded(self, operation: Awaitable[Any]) -> Any:
        try:
            return await operation
        except _ENDED as error:
            raise TransportError(f"the connection to {self._remote} broke: {error}") from None


async def failure(call: Call, remote: str) -> BloomBeeError | None:
    """Why an ended call ended, as our error; None when it ended in order."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return None
    return _translated(code, await call.details() or "", remote)


def _translated(code: grpc.StatusCode, details: str, remote: str) -> BloomBeeError:
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        return AuthError(f"{remote} shows another certificate than its peer's record names")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ProtocolError(f"a frame to or from {remote} is over the receiver's limit: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{remote} is no server of ours: {details}")
    if "Connection refused" in details:
        return Refused(f"nobody listens at {remote}: connection refused")
    reason = details.splitlines()[0] if details else code.name.lower()
    return TransportError(f"the connection to {remote} broke: {reason}")
