"""What peers say about themselves in the DHT: one record per server, one line per model.

Records are read from strangers. Whatever doesn't decode, isn't signed by the
peer it lies under, or breaks a bound below is dropped with a debug message.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import base58
import msgspec

from bloombee.core import PeerId, Span
from bloombee.swarm.envelope import TOMBSTONE, seal, unseal

if TYPE_CHECKING:
    from bloombee.swarm.identity import Identity

MAX_BLOCKS = 1024
MAX_LIFETIME_S = 300.0
"""A record that claims to live longer is dropped: its owner may die any moment."""
MAX_AHEAD_S = 60.0
"""A record published further in the future is dropped."""

_log = logging.getLogger(__name__)

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=96)]
_Address = Annotated[str, msgspec.Meta(min_length=3, max_length=96)]
_BlockIndex = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class ServerState(StrEnum):
    """Where a server is in its life.

    Choosing blocks (its span may still change), loading them, serving, or about to go.
    """

    CHOOSING = "choosing"
    JOINING = "joining"
    ONLINE = "online"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """One server as the swarm sees it.

    `addresses` are the `host:port` of its gRPC endpoint, best first;
    `certificate_hash` is the SHA-256 of its certificate (DER). `num_blocks` is the
    whole model's count, of which the server holds `span`. `kv_tokens` is how many
    tokens of KV it has room for, `max_length` the longest sequence it takes. One that will
    move to other blocks says so by `next_span`, some time before it leaves its own; it has
    moved last at `moved_at_s` (0: never). A `pinned` one stays where it is.
    """

    peer: PeerId
    fingerprint: str
    model: str
    num_blocks: int
    span: Span
    addresses: tuple[str, ...]
    certificate_hash: bytes
    dtype: str
    kv_tokens: int
    max_length: int
    throughput_tokens_per_s: float
    version: str
    state: ServerState
    published_at_s: float = 0.0
    pinned: bool = False
    next_span: Span | None = None
    moved_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelAnnouncement:
    """One server's word that its swarm serves a model of this name and fingerprint."""

    peer: PeerId
    fingerprint: str
    model: str
    num_blocks: int


class _Body(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what an envelope holds."""


class _Server(_Body, frozen=True, array_like=True, tag=1):
    """Fields may be added at the end: older readers pass over them, newer ones know defaults."""

    fingerprint: _Name
    model: _Name
    num_blocks: _BlockIndex
    start: _BlockIndex
    end: _BlockIndex
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=4)]
    certificate_hash: Annotated[bytes, msgspec.Meta(max_length=32)]
    dtype: _Name
    kv_tokens: _Count
    max_length: _Count
    throughput_tokens_per_s: float
    version: _Name
    state: ServerState
    published_at_s: float
    pinned: bool = False
    next_start: _BlockIndex = 0
    next_end: _BlockIndex = 0
    moved_at_s: float = 0.0


class _Model(_Body, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    fingerprint: _Name
    model: _Name
    num_blocks: _BlockIndex


def encode_server(record: ServerRecord, expires_at_s: float, identity: Identity) -> bytes:
    """The sealed record, signed by `identity`, whose id must be the record's peer.

    Raises ValueError when the record breaks a bound that readers check.
    """
    if record.peer != identity.peer_id:
        raise ValueError(f"record of {record.peer} can't be signed by {identity.peer_id}")
    body = msgspec.msgpack.encode(
        _Server(
            fingerprint=record.fingerprint,
            model=record.model,
            num_blocks=record.num_blocks,
            start=record.span.start,
            end=record.span.end,
            addresses=record.addresses,
            certificate_hash=record.certificate_hash,
            dtype=record.dtype,
            kv_tokens=record.kv_tokens,
            max_length=record.max_length,
            throughput_tokens_per_s=record.throughput_tokens_per_s,
            version=record.version,
            state=record.state,
            published_at_s=record.published_at_s,
            pinned=record.pinned,
            next_start=record.next_span.start if record.next_span else 0,
            next_end=record.next_span.end if record.next_span else 0,
            moved_at_s=record.moved_at_s,
        )
    )
    _check_server(msgspec.msgpack.decode(body, type=_Server))
    return seal(body, expires_at_s, identity)


def decode_server(owner: bytes, sealed: bytes, now_s: float) -> ServerRecord | None:
    """The record that lay under the subkey `owner`, or None when it is gone or no good."""
    body = _open_body(owner, sealed, now_s)
    if not isinstance(body, _Server):
        return None
    try:
        _check_server(body)
        if body.published_at_s > now_s + MAX_AHEAD_S:
            raise ValueError(f"published {body.published_at_s - now_s:.0f} s in the future")
    except ValueError as error:
        _log.debug("dropped a server record of %s: %s", _name(owner), error)
        return None
    return ServerRecord(
        peer=_name(owner),
        fingerprint=body.fingerprint,
        model=body.model,
        num_blocks=body.num_blocks,
        span=Span(body.start, body.end),
        addresses=body.addresses,
        certificate_hash=body.certificate_hash,
        dtype=body.dtype,
        kv_tokens=body.kv_tokens,
        max_length=body.max_length,
        throughput_tokens_per_s=body.throughput_tokens_per_s,
        version=body.version,
        state=body.state,
        published_at_s=body.published_at_s,
        pinned=body.pinned,
        next_span=Span(body.next_start, body.next_end) if body.next_end else None,
        moved_at_s=body.moved_at_s,
    )


def encode_model(record: ServerRecord, expires_at_s: float, identity: Identity) -> bytes:
    """The sealed announcement of the model that `record`'s server serves."""
    body = _Model(record.fingerprint, record.model, record.num_blocks)
    return seal(msgspec.msgpack.encode(body), expires_at_s, identity)


def decode_model(owner: bytes, sealed: bytes, now_s: float) -> ModelAnnouncement | None:
    """The announcement that lay under the subkey `owner`, or None when gone or no good."""
    body = _open_body(owner, sealed, now_s)
    if not isinstance(body, _Model):
        return None
    if body.num_blocks < 1 or not _printable(body.fingerprint, body.model):
        _log.debug("dropped a model announcement of %s", _name(owner))
        return None
    return ModelAnnouncement(_name(owner), body.fingerprint, body.model, body.num_blocks)


def encode_tombstone(expires_at_s: float, identity: Identity) -> bytes:
    """What a peer puts in place of its records when it leaves."""
    return seal(TOMBSTONE, expires_at_s, identity)


def _open_body(owner: bytes, sealed: bytes, now_s: float) -> _Server | _Model | None:
    envelope = unseal(owner, sealed)
    if envelope is None:
        _log.debug("dropped a value under %s: not signed by it", _name(owner))
        return None
    if envelope.body == TOMBSTONE:
        return None
    if not now_s < envelope.expires_at_s < now_s + MAX_LIFETIME_S:
        _log.debug("dropped a value of %s: expires at %s", _name(owner), envelope.expires_at_s)
        return None
    try:
        return msgspec.msgpack.decode(envelope.body, type=_Server | _Model)
    except msgspec.MsgspecError as error:
        _log.debug("dropped a value of %s: %s", _name(owner), error)
        return None


def _check_server(body: _Server) -> None:
    """Raises ValueError for what the field types don't rule out."""
    if not body.start < body.end <= body.num_blocks:
        raise ValueError(f"span {body.start}:{body.end} of {body.num_blocks} blocks")
    if not (math.isfinite(body.throughput_tokens_per_s) and body.throughput_tokens_per_s >= 0):
        raise ValueError(f"throughput {body.throughput_tokens_per_s}")
    if body.next_end and not body.next_start < body.next_end <= body.num_blocks:
        raise ValueError(f"next span {body.next_start}:{body.next_end} of {body.num_blocks}")
    if not (math.isfinite(body.published_at_s) and math.isfinite(body.moved_at_s)):
        raise ValueError("no time of publishing")
    for address in body.addresses:
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"address {address!r} isn't host:port")
    # Names reach terminals and logs: no control characters.
    if not _printable(body.fingerprint, body.model, body.dtype, body.version, *body.addresses):
        raise ValueError("a name with unprintable characters")


def _printable(*texts: str) -> bool:
    return all(text.isprintable() for text in texts)


def _name(owner: bytes) -> PeerId:
    return PeerId(base58.b58encode(owner).decode())
