"""Tokens per dollar and per joule, for the outputs of the other benchmarks.

D = R H / (C + k P) over a lifetime H of a machine of price C at a price of energy k, or R over
the rent; E = R / P. P is read from the processors' energy counters (RAPL) and the devices
(NVML) where this user may read them, since the benchmark began; else it is declared. All processes
of a benchmark run on one machine, whose power and price count once. The line says which.

    machine = Economy.of(options)  # after add_flags(parser); begins to read
    print(economy_line(tokens_per_s, machine))
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from bloombee.planner.profiles import JOULES_PER_KWH
from bloombee.server.power import EnergyMeter

if TYPE_CHECKING:
    import argparse

WATTS, PURCHASE, LIFETIME_YEARS, DOLLARS_PER_KWH = 65.0, 600.0, 3.0, 0.15
"""A small desktop: nobody measured this machine."""
YEAR_S = 365 * 24 * 3600.0
NVML_S = 5.0


@dataclass(frozen=True)
class Power:
    """Watts, and what they are of."""

    watts: float
    boundary: str


@dataclass(frozen=True)
class Economy:
    """One machine: power as declared (`watts`) or read since this was made; rent or price."""

    watts: float = WATTS
    purchase: float = PURCHASE
    price_per_hour: float = 0.0
    lifetime_years: float = LIFETIME_YEARS
    dollars_per_kwh: float = DOLLARS_PER_KWH
    is_declared: bool = True
    meter: EnergyMeter = field(default_factory=EnergyMeter)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """What the flags of `add_flags` say."""
        return cls(
            watts=WATTS if options.watts is None else options.watts,
            purchase=options.purchase,
            price_per_hour=options.price_per_hour,
            is_declared=options.watts is not None,
        )

    def power(self) -> Power:
        """The watts to count with: declared by a flag, else read, else the default."""
        if not self.is_declared and (read := self._read()) is not None:
            return read
        whose = "declared" if self.is_declared else "assumed, no counter is readable here"
        return Power(self.watts, f"{self.watts:g} W {whose}, whole machine, no network")

    def _read(self) -> Power | None:
        processors, devices = self.meter.watts(), _nvml_watts()
        if not processors and not devices:
            return None
        names = ["RAPL of the processors"] if processors else []
        names += ["NVML of the devices"] if devices else []
        watts = processors + devices
        return Power(
            watts, f"{watts:.1f} W read: {' and '.join(names)}; no other parts, no network"
        )

    def dollars_per_s(self, watts: float) -> float:
        """Rent, or price over the lifetime and energy."""
        if self.price_per_hour:
            return self.price_per_hour / 3600
        energy = watts * self.dollars_per_kwh / JOULES_PER_KWH
        return self.purchase / (self.lifetime_years * YEAR_S) + energy

    @property
    def price(self) -> str:
        """What the dollars are made of."""
        if self.price_per_hour:
            return f"rent of ${self.price_per_hour:g} an hour"
        return (
            f"${self.purchase:g} over {self.lifetime_years:g} years "
            f"and ${self.dollars_per_kwh:g} a kWh"
        )


def economy_line(tokens_per_s: float, machine: Economy) -> str:
    """One line: tokens per dollar and per joule at that speed, and what they are of."""
    power = machine.power()
    per_dollar = tokens_per_s / max(machine.dollars_per_s(power.watts), 1e-12)
    per_joule = tokens_per_s / max(power.watts, 1e-9)
    return (
        f"tokens/$ {per_dollar:,.0f}, tokens/J {per_joule:.3f} at {tokens_per_s:.1f} tokens/s "
        f"(boundary: {power.boundary}; {machine.price})"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the machine draws and costs."""
    group = parser.add_argument_group("economy")
    group.add_argument(
        "--watts", type=float,
        help=f"declared power of the machine; else as read, else {WATTS:g}",
    )  # fmt: skip
    group.add_argument("--purchase", type=float, default=PURCHASE, help="dollars, over three years")
    group.add_argument("--price-per-hour", type=float, default=0.0, help="rent, in its place")


def _nvml_watts() -> float:
    """What all NVIDIA devices draw now; 0 without them."""
    command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=NVML_S, check=True)
        return sum(float(line) for line in said.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0
