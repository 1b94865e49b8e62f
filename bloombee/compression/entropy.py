"""Coding one byte plane: whether it pays, and zstd set up to do nothing but entropy coding.

The match search of zstd's presets finds nothing in a plane and spoils its literals:
5-14 % larger and half as fast (bf16). These parameters leave Huffman coding of
literals, in plain zstd frames that any zstd reads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import zstandard

from bloombee.compression.planes import Bytes

SAMPLE_BYTES = 4096
LEAST_GAIN = 0.03
"""A plane is coded when a sample promises to save this share of it."""
ASK_EVERY = 32
"""Payloads of a kind between two samples: neighbouring ones look alike."""

_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=18,
    hash_log=6,
    chain_log=6,
    min_match=7,
    target_length=0,
    write_content_size=1,
    write_checksum=0,
)


class _Contexts(threading.local):
    """zstd's contexts are costly to make and not for two threads at once."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def code(plane: Bytes) -> bytes:
    """`plane` as a zstd frame."""
    return _contexts.compressor.compress(plane.data)


def coded_size(frame: memoryview) -> int:
    """How many bytes a frame of `code` claims to hold, -1 when it says nothing.

    Raises ValueError for bytes that are no frame.
    """
    try:
        return zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def decode(frame: memoryview, size: int) -> Bytes:
    """The `size` bytes of a plane. Raises ValueError when the frame doesn't hold just these."""
    if coded_size(frame) != size:
        raise ValueError(f"a plane of {coded_size(frame)} bytes instead of {size}")
    try:
        plane = _contexts.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    return np.frombuffer(plane, dtype=np.uint8)


def entropy(sample: Bytes) -> float:
    """Shannon's bound in bits a byte, taking the bytes as independent."""
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / max(1, len(sample))
    return float(-(shares * np.log2(shares)).sum())


@dataclass(slots=True)
class _Verdict:
    pays: bool
    left: int


class Probe:
    """Which planes are worth coding, asked of a sample now and then."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[int, int, int], _Verdict] = {}

    def pays(self, plane: Bytes, index: int, planes: int) -> bool:
        """Whether to code plane `index` of `planes`."""
        key = (planes, index, len(plane).bit_length())
        known = self._verdicts.get(key)
        if known is not None and known.left:
            known.left -= 1
            return known.pays
        pays = entropy(_sample(plane)) <= 8 * (1 - LEAST_GAIN)
        self._verdicts[key] = _Verdict(pays, ASK_EVERY - 1)
        return pays

    def disappointed(self, index: int, planes: int, length: int) -> None:
        """Coding did not pay after all: don't try until the next sample."""
        self._verdicts[planes, index, length.bit_length()] = _Verdict(pays=False, left=ASK_EVERY)


def _sample(plane: Bytes) -> Bytes:
    step = len(plane) // SAMPLE_BYTES
    return plane if step < 2 else plane[:: step | 1][:SAMPLE_BYTES]
