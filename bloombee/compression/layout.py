"""What a tensor looks like on the wire: dtype by name, rows and width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloombee.errors import ProtocolError, RequestError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def wire_dtype(dtype: torch.dtype) -> str:
    """The wire's name of a torch dtype; raises RequestError when it does not travel."""
    if dtype not in _NAMES:
        raise RequestError(f"{dtype} does not travel: cast to one of {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a wire name; raises ProtocolError for any other name."""
    if name not in _DTYPES:
        raise ProtocolError(f"unknown dtype {name!r}: known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def row_bytes(width: int, dtype: str) -> int:
    """Bytes of one row of `width` unencoded; raises ProtocolError for an unknown dtype."""
    return width * torch_dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """A `[rows, width]` matrix of `dtype`, contiguous, as it is before encoding.

    Raises ProtocolError when rows or width is negative.
    """

    dtype: torch.dtype
    rows: int
    width: int

    def __post_init__(self) -> None:
        if self.rows < 0 or self.width < 0:
            raise ProtocolError(f"no matrix has {self.rows} rows and {self.width} columns")

    @property
    def raw_bytes(self) -> int:
        """Bytes it takes unencoded."""
        return self.rows * self.width * self.dtype.itemsize

    def __str__(self) -> str:
        return f"[{self.rows}, {self.width}] of {str(self.dtype).removeprefix('torch.')}"
