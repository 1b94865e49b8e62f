"""What runs of several settings show beside each other: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Student's t, 97.5 %, by degrees of freedom; beyond the table it is close to 1.96.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
NORMAL = 2.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paired ratios: their median, and the 95 % interval of their geometric mean.

    The interval is infinite for a single pair.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired(values: Sequence[float], bases: Sequence[float]) -> Ratio:
    """`values` over `bases`, round by round."""
    ratios = [value / base for value, base in zip(values, bases, strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], 0.0, inf, 1)
    logs = [log(each) for each in ratios]
    freedom = len(logs) - 1
    factor = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    half = factor * stdev(logs) / sqrt(len(logs))
    return Ratio(median(ratios), exp(mean(logs) - half), exp(mean(logs) + half), len(ratios))


@dataclass(frozen=True, slots=True)
class Regret:
    """What a choice lost against the best fixed setting, as a share of that one's speed.

    Negative when it was faster. The best of several is the luckiest of them too, so the
    figure is a little unkind.
    """

    best: str
    share: float
    low: float
    high: float

    def meets(self, target: float) -> bool:
        """Whether the interval doesn't exclude the target; of a single pair, whether it holds."""
        return (self.share if self.high == inf else self.low) <= target


def regret(fixed: Mapping[str, Sequence[float]], auto: Sequence[float]) -> Regret:
    """Speeds by round of each fixed setting, and of what chose by itself."""
    best = max(fixed, key=lambda name: median(fixed[name]))
    ratio = paired(auto, fixed[best])
    if ratio.pairs == 1:
        return Regret(best, 1 - ratio.median, -inf, inf)
    return Regret(best, 1 - ratio.median, 1 - ratio.high, 1 - ratio.low)


def per_second(
    times_s: Sequence[float], start_s: float, end_s: float, width_s: float = 1.0
) -> list[float]:
    """Events a second in intervals of `width_s` from `start_s` on; the last may be cut."""
    counts = [0] * max(1, -int(-(end_s - start_s) // width_s))
    for at in times_s:
        if start_s <= at < end_s:
            counts[int((at - start_s) / width_s)] += 1
    return [count / width_s for count in counts]


def settled_after(
    times_s: Sequence[float], phase: tuple[float, float], least: float, window_s: float
) -> float | None:
    """How long after the phase begins all windows of `window_s` carry `least` events a second.

    Windows begin at every half second and lie within the phase; None: the last does not.
    """
    start_s, end_s = phase
    begins = [start_s + 0.5 * i for i in range(int((end_s - window_s - start_s) * 2) + 1)]
    for begin in reversed(begins):
        inside = sum(begin <= at < begin + window_s for at in times_s)
        if inside / window_s < least:
            after_s = begin + 0.5 - start_s
            return after_s if begin != begins[-1] else None
    return 0.0
