"""The codec that changes nothing, and the zero-copy views that all codecs start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Shaped

from bloombee.compression.layout import Layout
from bloombee.errors import ProtocolError

Buffer = bytes | bytearray | memoryview


class RawCodec:
    """Rows as they lie in memory, little endian."""

    name = "raw"
    is_lossy = False

    def encode(self, tensor: Shaped[torch.Tensor, "rows width"]) -> Buffer:
        """A view of the tensor's bytes; copies only from another device or a strided layout.

        The view keeps the memory alive, not its values: send it before they change.
        """
        return bytes_of(tensor)

    def decode(self, buffer: Buffer, layout: Layout) -> Shaped[torch.Tensor, "rows width"]:
        """A tensor that reads `buffer` in place: don't write into it.

        Raises ProtocolError when the length is not the layout's.
        """
        size = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        if size != layout.raw_bytes:
            raise ProtocolError(f"{size} bytes for {layout}, which takes {layout.raw_bytes}")
        return tensor_over(buffer, layout)


def bytes_of(tensor: Shaped[torch.Tensor, "rows width"]) -> Buffer:
    """The bytes of a matrix, without a copy when it lies contiguous on the CPU."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().to("cpu").contiguous().view(torch.uint8)
    return flat.numpy().data.cast("B")


def tensor_over(buffer: Buffer, layout: Layout) -> Shaped[torch.Tensor, "rows width"]:
    """A matrix over exactly `layout.raw_bytes` bytes of `buffer`, not to be written into."""
    if not layout.raw_bytes:
        return torch.empty((layout.rows, layout.width), dtype=layout.dtype)
    flat = torch.from_numpy(np.asarray(_Lent(np.frombuffer(buffer, dtype=np.uint8))))
    return flat.view(layout.dtype).view(layout.rows, layout.width)


@dataclass(frozen=True, slots=True)
class _Lent:
    """Read-only memory lent as writable: torch knows no read-only tensors and warns of them."""

    owner: np.ndarray

    @property
    def __array_interface__(self) -> dict[str, object]:
        address = self.owner.__array_interface__["data"][0]
        return {"version": 3, "data": (address, False), "shape": self.owner.shape, "typestr": "|u1"}
