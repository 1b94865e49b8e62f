"""A matrix of numbers as byte planes, the most significant first.

In hidden states sign and exponent repeat and the low mantissa is noise, so the planes
are coded each by itself. Numbers with eight bits of exponent are rotated by one bit
first: the exponent then fills the first plane and the sign travels with the mantissa.

Long matrices are cut into strips, so that the work stays in the processor's cache and
in memory that each thread keeps. Casting splits and merges several times faster than
strided slices: numbers are read or written from the byte that is wanted on. Numpy
shifts to the right fast and to the left slowly.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]

STRIP_VALUES = 128 << 10
MOST_VALUES = STRIP_VALUES * 3 // 2
MOST_PLANES = 4

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_TORCH_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_EIGHT_EXPONENT_BITS = (torch.bfloat16, torch.float32)


def is_rotated(dtype: torch.dtype) -> bool:
    """Whether the numbers are rotated before they are split."""
    return dtype in _EIGHT_EXPONENT_BITS


def words_of(tensor: Shaped[torch.Tensor, "rows width"]) -> Words:
    """The numbers of a matrix in a row, in place when it lies contiguous on the CPU."""
    if tensor.requires_grad or tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.detach().to("cpu").contiguous()
    return tensor.view(_TORCH_WORDS[tensor.dtype.itemsize]).numpy().reshape(-1)


def empty_words(memory: bytearray, count: int, size: int) -> Words:
    """`count` numbers of `size` bytes at the start of `memory`."""
    return np.frombuffer(memory, dtype=_WORDS[size], count=count)


@lru_cache(maxsize=256)
def strips(values: int) -> tuple[slice, ...]:
    """Nearly equal parts of `values` numbers, none longer than MOST_VALUES; one at least."""
    count = max(1, round(values / STRIP_VALUES))
    length = -(-values // count)
    return tuple(slice(at * length, min(values, (at + 1) * length)) for at in range(count))


class Scratch(threading.local):
    """Where one strip is taken apart, or put together, by each thread."""

    def __init__(self) -> None:
        self._words = np.empty((MOST_VALUES + 1) * MOST_PLANES, dtype=np.uint8)
        self._planes = np.empty((MOST_PLANES, MOST_VALUES), dtype=np.uint8)

    def plane(self, number: int, length: int) -> Bytes:
        """Memory for one plane."""
        return self._planes[number, :length]

    def load(self, words: Words, *, rotated: bool) -> Bytes:
        """Take in a strip; the planes, as strided views."""
        size = words.dtype.itemsize
        taken = self._view(0, len(words), size)
        if rotated:
            np.right_shift(words, 8 * size - 1, out=taken)
            np.add(taken, words, out=taken)
            np.add(taken, words, out=taken)
        else:
            np.copyto(taken, words)
        return self._words[: words.nbytes].reshape(-1, size).T[::-1]

    def extract(self, number: int, size: int, out: Bytes) -> None:
        """One plane of the strip taken in, into `out`."""
        # A number read so many bytes later begins with the byte that is wanted.
        np.copyto(out, self._view(size - 1 - number, len(out), size), casting="unsafe")

    def merge(self, planes: Sequence[Bytes], out: Words, *, rotated: bool) -> None:
        """Put a strip together in `out`."""
        size = len(planes)
        np.copyto(out, planes[-1])
        whole = self._view(0, len(out), size)
        for byte in range(1, size):
            self._words[:byte] = 0
            np.copyto(self._view(byte, len(out), size), planes[-1 - byte])
            np.bitwise_or(out, whole, out=out)
        if rotated:
            np.right_shift(out, 1, out=whole)
            np.multiply(out, 1 << (8 * size - 1), out=out)
            np.bitwise_or(out, whole, out=out)

    def _view(self, offset: int, count: int, size: int) -> Words:
        return self._words[offset : offset + count * size].view(_WORDS[size])
