"""When a daemon that died is started again, and when no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Give up after `tries` failures in a row; wait `first_s`, doubled each time, up to `cap_s`.

    A daemon that lived shorter than `steady_s` is one more failure of its start.
    """

    tries: int = 5
    first_s: float = 0.5
    cap_s: float = 8.0
    steady_s: float = 5.0


class Restarts:
    """Counts failures in a row."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self.failures = 0

    def died(self, lived_s: float) -> None:
        """One that had started has ended after `lived_s`."""
        self.failures = 0 if lived_s >= self._limits.steady_s else self.failures + 1

    def failed(self) -> None:
        """One did not start."""
        self.failures += 1

    @property
    def delay_s(self) -> float | None:
        """How long to wait before the next start; None when there have been failures enough."""
        if self.failures >= self._limits.tries:
            return None
        if not self.failures:
            return 0.0
        return min(self._limits.first_s * 2 ** (self.failures - 1), self._limits.cap_s)
