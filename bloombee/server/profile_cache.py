"""Profiles kept on disk, so that a machine measures a model once.

A file a profile, named by all that it depends on. One that can't be read, or makes no sense,
is as if it weren't there.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from pathlib import Path

import msgspec

from bloombee.config.directories import cache_directory
from bloombee.models.cache_folder import write_atomically
from bloombee.protocol.report_messages import TimeGrid

logger = logging.getLogger(__name__)

LONGEST_PASS_S = 3600.0


class ProfileKey(msgspec.Struct, frozen=True):
    """What the figures depend on; of the `span`, whether it has a head and more than one block."""

    hardware: str
    threads: int
    device: str
    fingerprint: str
    dtype: str
    version: str
    pace: float
    span: str

    @property
    def file(self) -> Path:
        """Where it is kept."""
        text = "\0".join(str(each) for each in msgspec.structs.astuple(self))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cache_directory() / "profiles" / f"{digest[:40]}.json"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of `CostTable` that are measured; `measured_at_s` since 1970."""

    key: ProfileKey
    decode: TimeGrid
    prefill: TimeGrid
    head: TimeGrid | None
    pass_s: float
    host_device_bytes_per_s: float
    disk_bytes_per_s: float
    watts: float
    measured_at_s: float


def load(key: ProfileKey) -> Measured | None:
    """What is kept under `key`, or None; a broken file is ignored with a warning."""
    file = key.file
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("can't read the profile in %s: %s; measuring again", file, error)
        return None
    try:
        found = msgspec.json.decode(text, type=Measured)
        _check(found, key)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
        logger.warning("ignoring the broken profile in %s: %s; measuring again", file, error)
        return None
    return found


def save(measured: Measured) -> None:
    """Keep it. Where that can't be, a warning says so."""
    write_atomically(measured.key.file, msgspec.json.encode(measured).decode())


def now_s() -> float:
    """Since 1970: profiles outlive processes."""
    return time.time()


def age_s(measured: Measured) -> float:
    """How long ago it was measured."""
    return max(0.0, now_s() - measured.measured_at_s)


def _check(found: Measured, key: ProfileKey) -> None:
    """Raises ValueError for figures that no machine has."""
    if found.key != key:
        raise ValueError("it is of another machine or model")
    rates = (found.host_device_bytes_per_s, found.disk_bytes_per_s, found.watts)
    if not all(math.isfinite(each) and each >= 0 for each in (*rates, found.measured_at_s)):
        raise ValueError("a rate that is no number")
    grids = [grid for grid in (found.decode, found.prefill, found.head) if grid is not None]
    seconds = [each for grid in grids for line in grid.seconds for each in line]
    if not all(0 <= each <= LONGEST_PASS_S for each in (*seconds, found.pass_s)):
        raise ValueError("a time that no pass takes")
    for grid in grids:
        if len(grid.seconds) != len(grid.rows) or any(
            len(line) != len(grid.contexts) for line in grid.seconds
        ):
            raise ValueError("a table with holes")
