"""What benchmarks make of their measurements: agreement of predictions, tokens per dollar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.economy import Economy, economy_line
from benchmarks.predicted.agreement import errors, kendall, misordered, spearman
from bloombee.server.power import EnergyMeter

if TYPE_CHECKING:
    from pathlib import Path


def test_ranks_agree_or_not() -> None:
    measured = [10.0, 20.0, 30.0, 40.0]
    assert kendall(measured, measured) == 1 and spearman(measured, measured) == pytest.approx(1)
    swapped = [11.0, 29.0, 22.0, 40.0]
    assert kendall(swapped, measured) == pytest.approx(4 / 6)
    assert spearman(swapped, measured) == pytest.approx(0.8)
    assert kendall(measured[::-1], measured) == -1
    assert errors([11.0], [10.0]) == [pytest.approx(0.1)]


def test_a_wrong_order_counts_where_the_difference_shows() -> None:
    assert misordered([2.0, 1.0], [10.0, 20.0], 0.15) == [(0, 1)]
    assert misordered([2.0, 1.0], [10.0, 11.0], 0.15) == []
    assert misordered([1.0, 2.0], [10.0, 20.0], 0.15) == []


def test_dollars_are_rent_or_price_and_energy(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    bought = Economy(watts=1000.0, purchase=3 * 365 * 24 * 3600.0, meter=meter)
    # A dollar a second for the machine, and 0.15 / 3600 a second for a kilowatt.
    assert bought.dollars_per_s(1000.0) == pytest.approx(1 + 0.15 / 3600)
    rented = Economy(watts=50.0, price_per_hour=0.36, meter=meter)
    line = economy_line(100.0, rented)
    assert "tokens/$ 1,000,000, tokens/J 2.000 at 100.0 tokens/s" in line
    assert "(boundary: 50 W declared, whole machine, no network; rent of $0.36 an hour)" in line
