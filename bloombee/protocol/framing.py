"""Frames: a fixed head, a message, and the payload's bytes.

    offset  size  what
    0       1     kind: 0 keep-alive (the frame ends here), 1 message
    1       4     message length, little endian
    5       4     payload length, little endian
    9       ...   message, zero bytes up to a multiple of 16, payload, nothing after it

The padding keeps tensors aligned when they are read in place; a frame without
payload has none. Lengths are checked against the frame before anything is allocated.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from bloombee.errors import ProtocolError
from bloombee.protocol.messages import AnyMessage, Output, Pages, Step
from bloombee.protocol.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

KEEP_ALIVE = b"\x00"
MAX_MESSAGE_BYTES = 1 << 20

_HEAD = struct.Struct("<BII")
_MESSAGE = 1
_ALIGNMENT = 16
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

Buffer = bytes | bytearray | memoryview


def encode(message: AnyMessage, payload: Buffer = b"") -> Sequence[Buffer]:
    """The parts of one frame, to be sent joined; the payload is not copied."""
    body = _encoder.encode(message)
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    head = _HEAD.pack(_MESSAGE, len(body), size)
    return (head, body, bytes(_padding(len(body), size)), payload)


def _padding(body: int, payload: int) -> int:
    return -(_HEAD.size + body) % _ALIGNMENT if payload else 0


def decode(frame: Buffer) -> tuple[AnyMessage, memoryview] | None:
    """The message and payload of a frame, or None for a keep-alive.

    The payload is a view into `frame`. Raises ProtocolError when the frame is
    empty, truncated, too long, or holds no known message.
    """
    view = memoryview(frame).cast("B")
    if view.nbytes == 1 and view[0] == 0:
        return None
    if view.nbytes < _HEAD.size:
        raise ProtocolError(
            f"truncated frame: {view.nbytes} bytes, the head alone has {_HEAD.size}"
        )
    kind, body, payload = _HEAD.unpack_from(view)
    if kind != _MESSAGE:
        raise ProtocolError(f"unknown frame kind {kind}")
    if body > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {body} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    start = _HEAD.size + body + _padding(body, payload)
    if start + payload != view.nbytes:
        raise ProtocolError(f"frame of {view.nbytes} bytes announces {start + payload}")
    if any(view[_HEAD.size + body : start]):
        raise ProtocolError("the padding of a frame must be zero")
    try:
        message = _decoder.decode(view[_HEAD.size : _HEAD.size + body])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {one_line(str(error))}") from None
    if payload and not isinstance(message, Step | Output | Pages):
        raise ProtocolError(f"{type(message).__name__} carries {payload} bytes it can't describe")
    return message, view[start:]
