"""Tensor to frame and back, through the codec that a payload names."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Shaped

from bloombee.compression.layout import Layout, torch_dtype
from bloombee.compression.lossy import lossy_codecs
from bloombee.compression.raw import Buffer, RawCodec
from bloombee.compression.split import SplitCodec
from bloombee.errors import RequestError, Unsupported


class Codec(Protocol):
    """Both ways between a matrix and bytes; exact unless its name says lossy."""

    @property
    def name(self) -> str:
        """What payloads call it."""
        ...

    @property
    def is_lossy(self) -> bool:
        """Whether what comes back may differ."""
        ...

    def encode(self, tensor: Shaped[torch.Tensor, "rows width"]) -> Buffer:
        """The bytes to send, possibly a view of the tensor's memory."""
        ...

    def decode(self, buffer: Buffer, layout: Layout) -> Shaped[torch.Tensor, "rows width"]:
        """The matrix again, possibly a view of `buffer`.

        Raises ProtocolError, before anything is allocated, when `buffer` can't hold it.
        """
        ...


SMALL_BYTES = 4096
"""Less than this travels as it is: coding it costs more than it saves on any link."""

_split = SplitCodec()
_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (RawCodec(), _split, *lossy_codecs(_split))
}
LOSSY = tuple(name for name, codec in _CODECS.items() if codec.is_lossy)


def encode(
    tensor: Shaped[torch.Tensor, "rows width"], codec: str = RawCodec.name
) -> tuple[str, Buffer]:
    """The codec used and the bytes to send; raw ones are a view, to be sent before it changes.

    Small tensors are sent raw whatever lossless `codec` was asked for; lossy ones do to a
    row what they do to it among many. Raises RequestError for a tensor that is no matrix or
    that a lossy codec can't carry, Unsupported for an unknown codec.
    """
    if tensor.dim() != 2:
        raise RequestError(f"only matrices travel, got shape {tuple(tensor.shape)}")
    chosen = _codec(codec)
    if tensor.nbytes < SMALL_BYTES and not chosen.is_lossy:
        chosen = _CODECS[RawCodec.name]
    return chosen.name, chosen.encode(tensor)


def decode(
    buffer: Buffer, codec: str, dtype: str, rows: int, width: int
) -> Shaped[torch.Tensor, "rows width"]:
    """The matrix that a payload describes; may read `buffer` in place: don't write into it.

    Raises Unsupported for an unknown codec, and ProtocolError, before anything is
    allocated, for an unknown dtype or bytes that don't fit the shape.
    """
    return _codec(codec).decode(buffer, Layout(torch_dtype(dtype), rows, width))


def _codec(name: str) -> Codec:
    if name not in _CODECS:
        raise Unsupported(f"unknown codec {name!r}: known are {', '.join(_CODECS)}")
    return _CODECS[name]
