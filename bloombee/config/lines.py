"""How a slow line is written that a process is to play: `UP/DOWN:RTT`, in Mbit/s and ms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from bloombee.config.base import Flag

_SPEC = re.compile(r"(?P<up>\d+(?:\.\d+)?)/(?P<down>\d+(?:\.\d+)?)(?::(?P<rtt>\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class LineShape:
    """Bytes a second up and down, and the delay of what is sent."""

    up: float
    down: float
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LineShape:
        """From `UP/DOWN` or `UP/DOWN:RTT`. Raises ValueError."""
        found = _SPEC.fullmatch(text)
        up, down = (float(found[name]) for name in ("up", "down")) if found else (0.0, 0.0)
        if found is None or not up or not down:
            raise ValueError(
                "a line is written as UP/DOWN in Mbit/s, or UP/DOWN:RTT with ms, such as "
                f"20/100:40, got {text!r}"
            )
        return cls(up * 1e6 / 8, down * 1e6 / 8, float(found["rtt"] or 0.0) / 2e3)


def _checked(text: str) -> str:
    LineShape.parse(text)
    return text


EmulatedLine = Annotated[str, AfterValidator(_checked), Flag(metavar="UP/DOWN[:RTT]")]
EMULATE_LINK = "for benchmarks without root: play a line of UP/DOWN Mbit/s and an RTT in ms"
