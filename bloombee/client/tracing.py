"""Traced steps of one session, from when they began until they were answered."""

from __future__ import annotations

from collections.abc import Callable

from bloombee.client.ledger import PendingStep
from bloombee.client.traffic import StepTrace
from bloombee.protocol.messages import Output


class Tracer:
    """Hands a `StepTrace` to `take` for each traced step that is answered."""

    def __init__(self, take: Callable[[StepTrace], None]) -> None:
        self._take = take
        self._began_us: dict[int, int] = {}

    def began(self, step: PendingStep, now_us: int) -> None:
        """A step is about to be sent; what counts is the first time."""
        if step.trace:
            self._began_us.setdefault(step.number, now_us)

    def answered(
        self, step: PendingStep, output: Output, now_us: int, clock_us: int | None
    ) -> None:
        """An output came, of a stage whose clock is ours plus `clock_us` (None: unknown)."""
        began_us = self._began_us.pop(step.number, None)
        if began_us is None:
            return
        back_us = 0.0
        if step.is_ours and output.sent_us and clock_us is not None:
            back_us = max(0.0, now_us - (output.sent_us - clock_us))
        trip_us = float(now_us - began_us)
        trace = StepTrace(trip_us, output.timings, step.phase, back_us, looped=not step.is_ours)
        self._take(trace)
        if step.until:  # what the servers go on with begins as this one ends
            self._began_us[step.number + 1] = now_us

    def forget(self) -> None:
        """Nothing is pending any more."""
        self._began_us.clear()
