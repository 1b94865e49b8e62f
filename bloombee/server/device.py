"""The device that computes, its free memory, and how fast a span decodes on it."""

from __future__ import annotations

import secrets
from pathlib import Path

import psutil
import torch

from bloombee.core import PackedTable, SessionId
from bloombee.errors import SettingsError
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.server.work import Model
from bloombee.telemetry import Stopwatch

CGROUP = Path("/sys/fs/cgroup")
MEASURED_STEPS = 6


def choose_device(name: str) -> torch.device:
    """The device that `--device` names; auto is the first CUDA device, or the CPU.

    Raises SettingsError when this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise SettingsError(
                f"--device {name}: this machine has {count} CUDA devices that torch can use; "
                "use --device cpu or another index"
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingsError("--device mps: torch finds no Apple GPU here; use --device cpu")
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that blocks and KV could take on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def decode_tokens_per_s(model: Model, pool: KVPool) -> float:
    """How many tokens of one sequence go through the span in a second.

    For the compute thread. The pool is afterwards as before. Raises KVFull when
    not even a few tokens are free.
    """
    session = SessionId(secrets.token_bytes(16))
    pool.reserve(session, 1, MEASURED_STEPS + 1)
    rows = torch.zeros(1, model.hidden_size, device=model.device, dtype=model.dtype)
    watch = Stopwatch()
    try:
        for position in range(MEASURED_STEPS + 1):
            if position == 1:  # the first warms up
                watch = Stopwatch()
            table = PackedTable((0,), (position,), (1,))
            model.forward(rows, [BatchItem(session, table)], pool).cpu()
    finally:
        pool.free(session)
    return MEASURED_STEPS / max(watch.elapsed_s, 1e-6)


def _number(file: Path) -> int | None:
    """The number a control group's file holds; None without one, or without a limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
