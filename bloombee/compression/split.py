"""The lossless codec: byte planes, each coded or stored, equal rows once, one checksum.

A frame describes itself (little endian):

    u8 version  u8 item bytes, and flags  u16 0  u32 rows  u32 width
    [u32 distinct rows, u32 x rows: which distinct row each is]     if REPEATS is set
    u32 bytes, and CODED, for each plane of each strip
    the planes, the most significant first, strip after strip (see `planes`)
    u64 checksum of all before it
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from jaxtyping import Shaped
from numpy.typing import NDArray

from bloombee.compression import entropy, planes
from bloombee.compression.layout import Layout
from bloombee.compression.lent import Lender
from bloombee.compression.raw import Buffer
from bloombee.compression.repeats import find_repeats
from bloombee.errors import ProtocolError

VERSION = 2
REPEATS, ROTATED = 0x10, 0x20
CODED = 1 << 31

_HEAD = struct.Struct("<BBHII")
_U32 = np.dtype("<u4")
_SUM_BYTES = 8

_Body = tuple[int, memoryview]

_lender = Lender()
_scratch = planes.Scratch()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where things lie in a frame of `values` numbers of `size` bytes, once each."""

    values: int
    size: int
    index_bytes: int
    rotated: bool

    @property
    def table_at(self) -> int:
        return _HEAD.size + self.index_bytes

    def bodies_at(self, strips: int) -> int:
        return self.table_at + _U32.itemsize * self.size * strips


class SplitCodec:
    """Planes through `entropy`; exact for every bit pattern."""

    name = "split"
    is_lossy = False

    def __init__(self) -> None:
        self._probe = entropy.Probe()

    def encode(self, tensor: Shaped[torch.Tensor, "rows width"]) -> Buffer:
        """A frame in memory of its own."""
        rows, width = tensor.shape
        size = tensor.dtype.itemsize
        words, index = planes.words_of(tensor), None
        if (repeats := find_repeats(words.reshape(rows, width))) is not None:
            kept, which = repeats
            words = words.reshape(rows, width)[kept].reshape(-1)
            index = np.concatenate(([len(kept)], which)).astype(_U32)
        rotated = planes.is_rotated(tensor.dtype)
        plan = _Plan(len(words), size, 0 if index is None else index.nbytes, rotated)
        cuts = planes.strips(plan.values)
        frame = _lender.lend(plan.bodies_at(len(cuts)) + words.nbytes + _SUM_BYTES)
        view = memoryview(frame)
        kind = size | (ROTATED if rotated else 0) | (0 if index is None else REPEATS)
        _HEAD.pack_into(frame, 0, VERSION, kind, 0, rows, width)
        if index is not None:
            view[_HEAD.size : plan.table_at] = index.data.cast("B")
        end = self._write(words, plan, cuts, view)
        view[end : end + _SUM_BYTES] = xxhash.xxh3_64_digest(view[:end])
        return view[: end + _SUM_BYTES]

    def _write(
        self, words: planes.Words, plan: _Plan, cuts: Sequence[slice], view: memoryview
    ) -> int:
        """The table of planes and the planes; where they end."""
        at = plan.bodies_at(len(cuts))
        table: list[int] = []
        for cut in cuts:
            strip = _scratch.load(words[cut], rotated=plan.rotated)
            for number in range(plan.size):
                room = view[at : at + strip.shape[1]]
                table.append(self._write_plane(strip[number], number, plan.size, room))
                at += table[-1] & ~CODED
        struct.pack_into(f"<{len(table)}I", view, plan.table_at, *table)
        return at

    def _write_plane(self, seen: planes.Bytes, number: int, size: int, room: memoryview) -> int:
        """One plane into `room`; its entry in the table."""
        length = len(seen)
        if length and self._probe.pays(seen, number, size):
            plane = _scratch.plane(0, length)
            _scratch.extract(number, size, plane)
            if coded := entropy.code(plane, room):
                return coded | CODED
            self._probe.disappointed(number, size, length)
        _scratch.extract(number, size, np.frombuffer(room, dtype=np.uint8))
        return length

    def decode(self, buffer: Buffer, layout: Layout) -> Shaped[torch.Tensor, "rows width"]:
        """The matrix, in memory of its own.

        Raises ProtocolError when the frame is damaged or not of this layout; what it
        claims is checked before anything is allocated.
        """
        view = memoryview(buffer).cast("B")
        kind = _read_head(view, layout)
        body = view[: len(view) - _SUM_BYTES]
        size, values, index = layout.dtype.itemsize, layout.rows * layout.width, None
        if kind & REPEATS:
            distinct, index = _read_index(body, layout)
            values = distinct * layout.width
        index_bytes = 0 if index is None else _U32.itemsize + index.nbytes
        plan = _Plan(values, size, index_bytes, bool(kind & ROTATED))
        bodies = _read_table(body, plan)
        memory = _lender.lend(values * size)
        words = planes.empty_words(memory, values, size)
        _read_planes(bodies, plan, words)
        if index is not None:
            words = words.reshape(-1, layout.width)[index].reshape(-1)
        if not layout.raw_bytes:
            return torch.empty((layout.rows, layout.width), dtype=layout.dtype)
        flat = torch.frombuffer(words, dtype=layout.dtype)
        return flat.view(layout.rows, layout.width)


def _read_head(view: memoryview, layout: Layout) -> int:
    """The frame's kind, once the head fits the payload's message and the checksum is right."""
    if len(view) < _HEAD.size + _SUM_BYTES:
        raise ProtocolError(f"a frame of {len(view)} bytes is cut off in its header")
    version, kind, zero, rows, width = _HEAD.unpack_from(view)
    if version != VERSION or zero or kind >> 6:
        raise ProtocolError(f"a compressed frame of version {version}: known is {VERSION}")
    size = kind & 0x0F
    if (size, rows, width) != (layout.dtype.itemsize, layout.rows, layout.width):
        raise ProtocolError(f"a frame of [{rows}, {width}] x {size} bytes, announced as {layout}")
    if bool(kind & ROTATED) != planes.is_rotated(layout.dtype):
        raise ProtocolError(f"a frame of numbers of another kind, announced as {layout}")
    if xxhash.xxh3_64_digest(view[:-_SUM_BYTES]) != view[-_SUM_BYTES:]:
        raise ProtocolError("a compressed frame was damaged on the way: its checksum is wrong")
    return kind


def _read_index(body: memoryview, layout: Layout) -> tuple[int, NDArray[np.uint32]]:
    """How many distinct rows there are, and which of them each row is."""
    end = _HEAD.size + _U32.itemsize * (layout.rows + 1)
    if len(body) < end:
        raise ProtocolError("a compressed frame is cut off in its repeats")
    distinct, *_ = struct.unpack_from("<I", body, _HEAD.size)
    index = np.frombuffer(body[_HEAD.size + _U32.itemsize : end], dtype=_U32)
    if distinct > layout.rows or (len(index) and int(index.max()) >= distinct):
        raise ProtocolError("a compressed frame repeats a row that it does not hold")
    return distinct, index


def _read_table(body: memoryview, plan: _Plan) -> list[_Body]:
    """What the table says of every plane, with its bytes."""
    count = plan.size * len(planes.strips(plan.values))
    at = plan.table_at + _U32.itemsize * count
    if len(body) < at:
        raise ProtocolError("a compressed frame is cut off in its table of planes")
    found: list[_Body] = []
    for entry in struct.unpack_from(f"<{count}I", body, plan.table_at):
        length = entry & ~CODED
        found.append((entry, body[at : at + length]))
        at += length
    if at != len(body):
        raise ProtocolError(f"a compressed frame holds {len(body)} bytes and announces {at}")
    return found


def _read_planes(bodies: list[_Body], plan: _Plan, words: planes.Words) -> None:
    for number, cut in enumerate(planes.strips(plan.values)):
        out = words[cut]
        chosen = bodies[number * plan.size : (number + 1) * plan.size]
        strip = [_read_plane(place, len(out), *each) for place, each in enumerate(chosen)]
        _scratch.merge(strip, out, rotated=plan.rotated)


def _read_plane(number: int, length: int, entry: int, body: memoryview) -> planes.Bytes:
    if not entry & CODED:
        if len(body) != length:
            raise ProtocolError(f"a stored plane of {len(body)} bytes instead of {length}")
        return np.frombuffer(body, dtype=np.uint8)
    plane = _scratch.plane(number, length)
    try:
        entropy.decode(body, plane)
    except ValueError as error:
        raise ProtocolError(f"a plane can't be decompressed: {error}") from None
    return plane
