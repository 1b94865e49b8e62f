"""Signed envelopes: the only values that our DHT nodes store and pass on.

A value lies under a subkey that is the owner's binary peer id, and holds
`(body, expires_at, signature)`, signed by the key that this id carries. The
expiry is signed too, so a copy can't outlive what its owner said. An empty body
is a tombstone: the owner withdrew what was there.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Annotated

import base58
import msgspec

from bloombee.swarm.identity import SIGNATURE_BYTES, Identity, public_key_of, verify

MAX_BODY_BYTES = 1024
TOMBSTONE = b""
_CONTEXT = b"bloombee dht value 1\0"


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is stored; `expires_at_s` is wall-clock time, equal to the DHT's own expiry."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]
    expires_at_s: float
    signature: Annotated[
        bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)
    ]


def seal(body: bytes, expires_at_s: float, identity: Identity) -> bytes:
    """The encoded envelope around `body`; raises ValueError when the body is too long."""
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a DHT value of {len(body)} bytes exceeds {MAX_BODY_BYTES}")
    signature = identity.sign(_signed_bytes(body, expires_at_s))
    return msgspec.msgpack.encode(Envelope(body, expires_at_s, signature))


@lru_cache(maxsize=8192)
def unseal(owner: bytes, sealed: bytes) -> Envelope | None:
    """The envelope when `owner` (a binary peer id) signed it, else None; never raises.

    Cached, since every lookup meets the same records in several copies and a
    signature costs 100 us to check.
    """
    try:
        envelope = msgspec.msgpack.decode(sealed, type=Envelope)
    except msgspec.MsgspecError:
        return None
    peer_id = base58.b58encode(owner).decode()
    public_key = public_key_of(peer_id)
    if public_key is None:
        return None
    data = _signed_bytes(envelope.body, envelope.expires_at_s)
    return envelope if verify(peer_id, public_key, data, envelope.signature) else None


def _signed_bytes(body: bytes, expires_at_s: float) -> bytes:
    return _CONTEXT + struct.pack(">d", expires_at_s) + body
