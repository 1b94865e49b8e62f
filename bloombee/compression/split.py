"""The lossless codec: byte planes, each coded or stored, equal rows once, one checksum.

A frame describes itself (little endian):

    u8 version  u8 item bytes  u8 flags  u8 0  u32 rows  u32 width  u32 distinct rows
    u64 checksum of the header before it and of everything after
    [u32 x rows: which distinct row each is]        if flag 1 is set
    (u8 method, u32 bytes) for each plane, then the planes, the most significant first
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from jaxtyping import Shaped
from numpy.typing import NDArray

from bloombee.compression import entropy, planes
from bloombee.compression.layout import Layout
from bloombee.compression.raw import Buffer, bytes_of
from bloombee.compression.repeats import find_repeats
from bloombee.errors import ProtocolError

VERSION = 1
REPEATS = 1
STORED, CODED = 0, 1

_HEAD = struct.Struct("<BBBBIII")
_SUM = struct.Struct("<Q")
_PLANE = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class _Head:
    """The frame's header, checked against what the payload's message said."""

    flags: int
    rows: int
    width: int
    distinct: int
    planes: int

    @property
    def plane_bytes(self) -> int:
        return self.distinct * self.width

    @property
    def index_bytes(self) -> int:
        return 4 * self.rows if self.flags & REPEATS else 0


class SplitCodec:
    """Planes through `entropy`; exact for every bit pattern."""

    name = "split"

    def __init__(self) -> None:
        self._probe = entropy.Probe()

    def encode(self, tensor: Shaped[torch.Tensor, "rows width"]) -> Buffer:
        """A frame in memory of its own."""
        rows, width = tensor.shape
        size = tensor.dtype.itemsize
        words = planes.words_of(bytes_of(tensor), size).reshape(rows, width)
        flags, distinct, index = 0, rows, b""
        if (repeats := find_repeats(words)) is not None:
            kept, which = repeats
            words, flags, distinct = words[kept], REPEATS, len(kept)
            index = which.astype(np.uint32).tobytes()
        head = _HEAD.pack(VERSION, size, flags, 0, rows, width, distinct)
        parts = [index, *self._coded(words.reshape(-1), size)]
        return b"".join((head, _checksum(head, parts), *parts))

    def _coded(self, words: NDArray[np.unsignedinteger], size: int) -> list[Buffer]:
        """The table of planes, then the planes."""
        table, bodies = list[Buffer](), list[Buffer]()
        for number, plane in enumerate(planes.split(words)):
            method, body = STORED, plane.data
            if len(plane) and self._probe.pays(plane, number, size):
                coded = entropy.code(plane)
                if len(coded) < len(plane):
                    method, body = CODED, memoryview(coded)
                else:
                    self._probe.disappointed(number, size, len(plane))
            table.append(_PLANE.pack(method, len(body)))
            bodies.append(body)
        return table + bodies

    def decode(self, buffer: Buffer, layout: Layout) -> Shaped[torch.Tensor, "rows width"]:
        """The matrix, in new memory.

        Raises ProtocolError when the frame is damaged or not of this layout; what it
        claims is checked before anything is allocated.
        """
        view = memoryview(buffer).cast("B")
        head = _read_head(view, layout)
        at = _HEAD.size + _SUM.size
        index = view[at : at + head.index_bytes]
        at += head.index_bytes
        words = planes.merge(_read_planes(view[at:], head))
        if head.flags & REPEATS:
            words = _repeated(words.reshape(head.distinct, head.width), index)
        if not layout.raw_bytes:
            return torch.empty((layout.rows, layout.width), dtype=layout.dtype)
        flat = torch.from_numpy(words.reshape(-1).view(np.uint8))
        return flat.view(layout.dtype).view(layout.rows, layout.width)


def _checksum(head: bytes, parts: list[Buffer]) -> bytes:
    running = xxhash.xxh3_64(head)
    for part in parts:
        running.update(part)
    return _SUM.pack(running.intdigest())


def _read_head(view: memoryview, layout: Layout) -> _Head:
    start = _HEAD.size + _SUM.size
    if len(view) < start:
        raise ProtocolError(f"a frame of {len(view)} bytes is cut off in its header")
    version, size, flags, zero, rows, width, distinct = _HEAD.unpack_from(view)
    if version != VERSION or zero or flags & ~REPEATS:
        raise ProtocolError(f"a compressed frame of version {version}: known is {VERSION}")
    if (size, rows, width) != (layout.dtype.itemsize, layout.rows, layout.width):
        raise ProtocolError(f"a frame of [{rows}, {width}] x {size} bytes, announced as {layout}")
    if distinct > rows or (not flags & REPEATS and distinct != rows):
        raise ProtocolError(f"a frame with {distinct} distinct rows of {rows}")
    running = xxhash.xxh3_64(view[: _HEAD.size])
    running.update(view[start:])
    if _SUM.pack(running.intdigest()) != view[_HEAD.size : start]:
        raise ProtocolError("a compressed frame was damaged on the way: its checksum is wrong")
    return _Head(flags, rows, width, distinct, size)


def _read_planes(view: memoryview, head: _Head) -> list[planes.Bytes]:
    at = _PLANE.size * head.planes
    if len(view) < at:
        raise ProtocolError("a compressed frame is cut off in its table of planes")
    found: list[planes.Bytes] = []
    for number in range(head.planes):
        method, length = _PLANE.unpack_from(view, _PLANE.size * number)
        found.append(_read_plane(view[at : at + length], method, length, head))
        at += length
    if at != len(view):
        raise ProtocolError(f"{len(view) - at} bytes too many in a compressed frame")
    return found


def _read_plane(body: memoryview, method: int, length: int, head: _Head) -> planes.Bytes:
    if len(body) != length:
        raise ProtocolError("a compressed frame is cut off in a plane")
    if method == STORED and length == head.plane_bytes:
        return np.frombuffer(body, dtype=np.uint8)
    if method != CODED:
        raise ProtocolError(f"a plane of {length} bytes by method {method}, of {head.plane_bytes}")
    try:
        return entropy.decode(body, head.plane_bytes)
    except ValueError as error:
        raise ProtocolError(f"a plane can't be decompressed: {error}") from None


def _repeated(words: NDArray[np.unsignedinteger], index: memoryview) -> NDArray[np.unsignedinteger]:
    which = np.frombuffer(index, dtype=np.uint32)
    if len(which) and int(which.max()) >= len(words):
        raise ProtocolError("a compressed frame repeats a row that it does not hold")
    return words[which]
