"""Rows as the payload of a frame."""

from __future__ import annotations

import torch
from jaxtyping import Float

from bloombee import compression
from bloombee.errors import ProtocolError
from bloombee.protocol.messages import Payload, WireDtype

WIRE_DTYPES: dict[torch.dtype, WireDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def encode_rows(
    rows: Float[torch.Tensor, "T D"], dtype: WireDtype, codec: str
) -> tuple[Payload, compression.Buffer]:
    """The description of `rows`, which have `dtype`, and their bytes: to be sent at once."""
    used, content = compression.encode(rows, codec)
    return Payload("rows", dtype, rows.shape[0], rows.shape[1], used), content


def decode_rows(
    payload: Payload, content: memoryview, expected: tuple[int, int], dtype: WireDtype
) -> Float[torch.Tensor, "R D"]:
    """The `expected` [R, D] rows of an output; they may read the frame's own memory.

    Raises ProtocolError when the answer has another shape, dtype or content.
    """
    rows, width = expected
    if payload.rows != rows or (rows and payload.width != width):
        raise ProtocolError(
            f"asked for [{rows}, {width}] rows, got [{payload.rows}, {payload.width}]"
        )
    if payload.content != "rows" or payload.dtype != dtype:
        raise ProtocolError(f"asked for rows of {dtype}, got {payload.content} of {payload.dtype}")
    return compression.decode(content, payload.codec, payload.dtype, rows, payload.width)
