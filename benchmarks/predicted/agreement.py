"""How well predictions agree with measurements: no clock, no I/O."""

from __future__ import annotations

from itertools import combinations
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Predicted over measured, less one."""
    return [guess / truth - 1 for guess, truth in zip(predicted, measured, strict=True)]


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-a: pairs in the same order less those in the other, over all pairs."""
    pairs = list(combinations(zip(predicted, measured, strict=True), 2))
    agreed = sum(_sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in pairs)
    return agreed / len(pairs)


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; ties share their mean rank."""
    left, right = _ranks(predicted), _ranks(measured)
    here, there = mean(left), mean(right)
    product = sum((a - here) * (b - there) for a, b in zip(left, right, strict=True))
    spread = sum((a - here) ** 2 for a in left) * sum((b - there) ** 2 for b in right)
    return product / spread**0.5


def misordered(
    predicted: Sequence[float], measured: Sequence[float], least: float
) -> list[tuple[int, int]]:
    """Pairs in the wrong order whose measurements differ by more than `least`, as a share."""
    places = range(len(measured))
    return [
        (a, b)
        for a, b in combinations(places, 2)
        if (predicted[a] - predicted[b]) * (measured[a] - measured[b]) < 0
        and max(measured[a], measured[b]) > (1 + least) * min(measured[a], measured[b])
    ]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]
