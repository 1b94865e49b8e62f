"""Lossy codecs, by names that say so: for who asks for them, never chosen by themselves.

Every row is coded by itself, so that rows sent again, in whatever company, come out as
the first time. Numbers of 16 bits that would be cut to 16 bits, and integers, lose
nothing: they go through the lossless codec. A frame (little endian):

    u8 version  u8 kind (a tensor type's place in KINDS)  u16 0  u32 scales
    f32 for each scale
    u64 checksum of all before it
    the numbers that are left, as a frame of the lossless codec
"""

from __future__ import annotations

import struct

import numpy as np
import torch
import xxhash
from jaxtyping import Float, Float32, Int8, Shaped

from bloombee.compression.layout import Layout
from bloombee.compression.raw import Buffer, bytes_of
from bloombee.compression.split import SplitCodec
from bloombee.errors import ProtocolError, RequestError

VERSION = 1
KINDS = (torch.int8, torch.bfloat16, torch.float16)

_HEAD = struct.Struct("<BBHI")
_SUM_BYTES = 8
_MOST = 127


class LossyCodec:
    """Fewer bits a number, then lossless planes."""

    is_lossy = True

    def __init__(self, name: str, kind: torch.dtype, split: SplitCodec) -> None:
        self.name = name
        self._kind = kind
        self._split = split

    def encode(self, tensor: Shaped[torch.Tensor, "rows width"]) -> Buffer:
        """A frame in memory of its own.

        Raises RequestError for values that the codec can't come near: for `lossy-int8`
        those that are not finite, for `lossy-fp16` finite ones beyond its range.
        """
        tensor = tensor.detach().to("cpu")
        scales, left = torch.empty(0), tensor
        if not tensor.is_floating_point() or tensor.dtype.itemsize <= self._kind.itemsize:
            pass
        elif self._kind is torch.int8:
            scales, left = _scaled(tensor, self.name)
        else:
            left = _cut(tensor, self._kind, self.name)
        kind = KINDS.index(left.dtype) + 1 if left is not tensor else 0
        head = _HEAD.pack(VERSION, kind, 0, len(scales)) + bytes(bytes_of(scales[None]))
        return b"".join((head, xxhash.xxh3_64_digest(head), self._split.encode(left)))

    def decode(self, buffer: Buffer, layout: Layout) -> Shaped[torch.Tensor, "rows width"]:
        """The matrix of the layout's dtype, in memory of its own.

        Raises ProtocolError when the frame is damaged or not of this layout.
        """
        view = memoryview(buffer).cast("B")
        kind, scales, rest = _read(view, layout)
        left = self._split.decode(rest, Layout(kind, layout.rows, layout.width))
        if kind is torch.int8:
            limit = torch.finfo(layout.dtype).max  # which rounding may have passed
            wide = left.float().mul_(scales[:, None])
            return wide.clamp_(-limit, limit).to(layout.dtype)
        return left.to(layout.dtype)


def lossy_codecs(split: SplitCodec) -> tuple[LossyCodec, ...]:
    """All of them."""
    return (
        LossyCodec("lossy-int8", torch.int8, split),
        LossyCodec("lossy-bf16", torch.bfloat16, split),
        LossyCodec("lossy-fp16", torch.float16, split),
    )


def _scaled(
    tensor: Float[torch.Tensor, "rows width"], name: str
) -> tuple[Float32[torch.Tensor, " rows"], Int8[torch.Tensor, "rows width"]]:
    """One scale for each row and its numbers in such units, at most 127 of them."""
    wide = tensor.float()
    largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(len(wide))
    if not bool(largest.isfinite().all()):
        raise RequestError(f"{name} can't carry infinities and NaNs: use a lossless codec")
    scales = largest / _MOST
    units = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return scales, units.clamp_(-_MOST, _MOST).to(torch.int8)


def _cut(
    tensor: Float[torch.Tensor, "rows width"], kind: torch.dtype, name: str
) -> Float[torch.Tensor, "rows width"]:
    """The nearest numbers of `kind`; infinities and NaNs stay."""
    left = tensor.to(kind)
    if kind is torch.float16 and int(left.isinf().sum()) != int(tensor.isinf().sum()):
        raise RequestError(f"{name} carries numbers up to 65,504, these are larger: use lossy-bf16")
    return left


def _read(
    view: memoryview, layout: Layout
) -> tuple[torch.dtype, Float32[torch.Tensor, " scales"], memoryview]:
    """What numbers are left, the scales, and the frame with the numbers."""
    if len(view) < _HEAD.size:
        raise ProtocolError(f"a lossy frame of {len(view)} bytes is cut off in its header")
    version, kind, zero, count = _HEAD.unpack_from(view)
    if version != VERSION or zero or kind > len(KINDS):
        raise ProtocolError(f"a lossy frame of version {version}, kind {kind}: known is {VERSION}")
    left = KINDS[kind - 1] if kind else layout.dtype
    if count != (layout.rows if left is torch.int8 and kind else 0):
        raise ProtocolError(f"a lossy frame with {count} scales, announced as {layout}")
    end = _HEAD.size + 4 * count
    if xxhash.xxh3_64_digest(view[:end]) != view[end : end + _SUM_BYTES]:
        raise ProtocolError("a lossy frame was damaged on the way: its checksum is wrong")
    scales = np.frombuffer(view[_HEAD.size : end], dtype="<f4").copy()
    return left, torch.from_numpy(scales), view[end + _SUM_BYTES :]
