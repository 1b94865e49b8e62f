"""Rows and token ids as the payload of a frame."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from bloombee import compression
from bloombee.errors import ProtocolError
from bloombee.planner.link_control import SPLIT
from bloombee.planner.neighbours import Neighbours, Rows
from bloombee.protocol.messages import Payload, WireDtype
from bloombee.telemetry import loop_us, now_us

_log = logging.getLogger(__name__)

WIRE_DTYPES: dict[torch.dtype, WireDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True)
class RowsTo:
    """How rows of one phase go to a peer, as `neighbours` has measured it."""

    neighbours: Neighbours
    peer: str
    phase: str

    def codec(self, raw_bytes: int, dtype: WireDtype) -> str:
        """Of so many bytes of rows."""
        rows = Rows(phase=self.phase, raw_bytes=raw_bytes, dtype=dtype)
        choice = self.neighbours.choose(self.peer, rows, loop_us())
        if choice.is_new:
            to = self.peer[-8:]
            _log.info("%s rows to %s go %s: %s", self.phase, to, choice.codec, choice.reason)
        return choice.codec


def encode_rows(
    rows: Float[torch.Tensor, "T D"], dtype: WireDtype, to: RowsTo
) -> tuple[Payload, compression.Buffer]:
    """The description of `rows`, which have `dtype`, and their bytes: to be sent at once."""
    began_us = now_us()
    used, content = compression.encode(rows, to.codec(rows.nbytes, dtype))
    if used == SPLIT:
        took_s, size = (now_us() - began_us) / 1e6, memoryview(content).nbytes
        to.neighbours.record.encoded(dtype, rows.nbytes, size, took_s, loop_us() / 1e6)
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
