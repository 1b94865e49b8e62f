"""How fast bytes come to the device from the host, and to the host from disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from bloombee.telemetry import Stopwatch

logger = logging.getLogger(__name__)

COPIED_BYTES = 64 << 20
READ_BYTES = 64 << 20
READ_S = 0.25
PIECE_BYTES = 4 << 20


def host_device_bytes_per_s(device: torch.device) -> float:
    """From pinned host memory to a CUDA device; 0 on others, whose memory is the host's."""
    if device.type != "cuda":
        return 0.0
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    best_s = float("inf")
    for _ in range(4):  # the first warms up
        torch.cuda.synchronize(device)
        watch = Stopwatch()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best_s = min(best_s, watch.elapsed_s)
    return COPIED_BYTES / max(best_s, 1e-9)


def disk_bytes_per_s(file: Path | None) -> float:
    """From the disk on which the weights lie; 0 when that can't be told.

    Reads from the middle of the file for READ_S at most, after asking the system to drop that
    part from its page cache. A system that keeps it nonetheless makes this an upper bound.
    """
    if file is None:
        return 0.0
    try:
        with file.open("rb", buffering=0) as opened:
            return _read(opened.fileno(), file.stat().st_size)
    except OSError as error:
        logger.warning("the speed of the disk is not known: can't read %s: %s", file, error)
        return 0.0


def _read(descriptor: int, file_bytes: int) -> float:
    start = max(0, file_bytes - READ_BYTES) // 2
    length = min(READ_BYTES, file_bytes - start)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, start, os.SEEK_SET)
    read, watch = 0, Stopwatch()
    while read < length and watch.elapsed_s < READ_S:
        count = len(os.read(descriptor, min(PIECE_BYTES, length - read)))
        if not count:
            break
        read += count
    return read / max(watch.elapsed_s, 1e-9)
