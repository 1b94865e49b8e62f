"""Rows and token ids as the payload of a frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


def encode_ids(ids: Sequence[int]) -> tuple[Payload, compression.Buffer]:
    """The description of T ids `[T, 1]`, and their bytes."""
    return Payload("ids", "int32", len(ids), 1), ids_bytes(ids)


def ids_bytes(ids: Sequence[int]) -> bytes:
    """Ids as int32, little endian."""
    return np.asarray(ids, dtype="<i4").tobytes()


def decode_ids(payload: Payload, content: memoryview, expected: int) -> list[int]:
    """The `expected` ids of an output.

    Raises ProtocolError when the answer has another shape, dtype or content.
    """
    described = (payload.content, payload.dtype, payload.codec, payload.rows, payload.width)
    if described != ("ids", "int32", "raw", expected, 1) or len(content) != 4 * expected:
        raise ProtocolError(
            f"asked for {expected} ids, got {payload.rows} {payload.content} of {payload.dtype}"
        )
    return np.frombuffer(content, dtype="<i4").tolist()
