"""Watts that this machine draws, where it can be read: RAPL on Linux, NVML for CUDA devices."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from bloombee.telemetry import Stopwatch

logger = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """The processor packages' energy counters (RAPL), since it was made or last asked.

    They leave out memory, disks, network, fans and power supply.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # Packages only: their parts are counted in them.
        self._zones = [zone for zone in sorted(folder.glob("*-rapl:*")) if ":" not in _tail(zone)]
        self._began = self._read()
        self._watch = Stopwatch()

    @property
    def is_readable(self) -> bool:
        """Whether there are counters, and this user may read them."""
        return bool(self._began)

    def watts(self) -> float:
        """The mean since it was made; 0 where it can't be read."""
        now, spent_s = self._read(), self._watch.elapsed_s
        if not self._began or len(now) != len(self._began) or spent_s <= 0:
            return 0.0
        joules = 0.0
        for zone, before, after in zip(self._zones, self._began, now, strict=True):
            turned = 0 if after >= before else _number(zone / "max_energy_range_uj") or 0
            joules += (after + turned - before) / 1e6
        return max(0.0, joules / spent_s)

    def _read(self) -> list[int]:
        counts = [_number(zone / "energy_uj") for zone in self._zones]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else []


def device_watts(device: torch.device) -> float:
    """What a CUDA device draws now, by NVML; 0 where it can't be told."""
    if device.type != "cuda":
        return 0.0
    try:
        return torch.cuda.power_draw(device) / 1e3
    except (ImportError, RuntimeError) as error:
        logger.debug("NVML doesn't tell the device's power: %s", error)
        return 0.0


def _tail(zone: Path) -> str:
    return zone.name.partition(":")[2]


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
