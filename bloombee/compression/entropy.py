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

_WINDOW_LOG = 18
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=_WINDOW_LOG,
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
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


_contexts = _Contexts()


def code(plane: Bytes, room: memoryview) -> int:
    """Write `plane` as a zstd frame into `room`; its bytes, 0 when it would fill the room."""
    size = _contexts.compressor.stream_reader(plane.data, size=len(plane)).readinto(room)
    return size if size < len(room) else 0


def decode(frame: memoryview, out: Bytes) -> None:
    """Fill `out` with a plane. Raises ValueError when the frame doesn't hold just that."""
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != len(out):
            raise ValueError(f"a plane of {claimed} bytes instead of {len(out)}")
        size = _contexts.decompressor.stream_reader(frame).readinto(out.data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if size != len(out):
        raise ValueError(f"a plane cut off after {size} of {len(out)} bytes")


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
