"""Requests to a libp2p daemon over its control socket, each on a connection of its own.

hivemind's own client can't be used from a second event loop, and leaves the
connection of a call that failed or was cancelled to the garbage collector.
"""

# hivemind ships no type stubs, and generated modules have members no type checker sees.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import (
    P2PDaemonError,
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FAILURES = (OSError, P2PDaemonError, asyncio.IncompleteReadError)
"""What the calls below raise when the daemon refuses or is gone."""

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_pb: Any = p2pd_pb2


@dataclass(frozen=True, slots=True)
class DaemonControl:
    """The daemon that listens on `socket`; for any event loop. Deadlines are the caller's."""

    socket: Path

    async def connect(self, peer: str, addresses: Iterable[str]) -> None:
        """Connect the daemon to `peer` at one of its multiaddresses."""
        packed = [Multiaddr(address).to_bytes() for address in addresses]
        wanted = _pb.ConnectRequest(peer=_binary(peer), addrs=packed)
        await self._do(_pb.Request(type=_pb.Request.CONNECT, connect=wanted))

    async def disconnect(self, peer: str) -> None:
        """Cut all connections to `peer`, also those that only seem to stand."""
        wanted = _pb.DisconnectRequest(peer=_binary(peer))
        await self._do(_pb.Request(type=_pb.Request.DISCONNECT, disconnect=wanted))

    async def addresses_of(self, peer: str) -> tuple[str, ...]:
        """Where the daemon knows `peer` to listen; it looks around when it isn't connected."""
        wanted = _pb.DHTRequest(type=_pb.DHTRequest.FIND_PEER, peer=_binary(peer))
        answer = await self._do(_pb.Request(type=_pb.Request.DHT, dht=wanted))
        return tuple(str(Multiaddr(packed)) for packed in answer.dht.peer.addrs)

    async def identify(self) -> None:
        """Return when the daemon has answered."""
        await self._do(_pb.Request(type=_pb.Request.IDENTIFY))

    async def open_stream(self, peer: str, protocol: str) -> Ends:
        """A byte stream to `peer`, which the daemon looks up, connects to, and proves.

        Raises ValueError for a malformed peer id.
        """
        wanted = _pb.StreamOpenRequest(peer=_binary(peer), proto=[protocol])
        _, ends = await self._ask(_pb.Request(type=_pb.Request.STREAM_OPEN, streamOpen=wanted))
        return ends

    async def accept_streams(self, protocol: str, at: Path) -> Ends:
        """Have the daemon connect to the socket `at` for each stream that a peer opens to us.

        The daemon says nothing more on the connection that is returned, which ends with it.
        """
        wanted = _pb.StreamHandlerRequest(addr=_unix(at), proto=[protocol], balanced=False)
        _, ends = await self._ask(
            _pb.Request(type=_pb.Request.STREAM_HANDLER, streamHandler=wanted)
        )
        return ends

    async def refuse_streams(self, protocol: str, at: Path) -> None:
        """Take `accept_streams` back."""
        wanted = _pb.RemoveStreamHandlerRequest(addr=_unix(at), proto=[protocol])
        kind = _pb.Request.REMOVE_STREAM_HANDLER
        await self._do(_pb.Request(type=kind, removeStreamHandler=wanted))

    async def _do(self, request: Any) -> Any:
        answer, (_, writer) = await self._ask(request)
        writer.close()
        return answer

    async def _ask(self, request: Any) -> tuple[Any, Ends]:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        try:
            await write_pbmsg(writer, request)
            response = _pb.Response()
            await read_pbmsg_safe(reader, response)
            raise_if_failed(response)
        except BaseException:
            writer.transport.abort()
            raise
        return response, (reader, writer)


async def read_opener(reader: asyncio.StreamReader) -> str:
    """Who opened the stream that the daemon hands over; its key is proven."""
    opened = _pb.StreamInfo()
    await read_pbmsg_safe(reader, opened)
    return str(PeerID(opened.peer).to_base58())


def _binary(peer: str) -> bytes:
    return bytes(PeerID.from_base58(peer).to_bytes())


def _unix(path: Path) -> bytes:
    return bytes(Multiaddr(f"/unix{path}").to_bytes())
