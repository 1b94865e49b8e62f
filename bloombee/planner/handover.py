"""Pages or replay: how a session comes to another server at the lower price.

Replay computes everything again; pages only have to travel. What a link carries
is known once some have come, so a fetch begins and is judged as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLE_BYTES = 256 << 10
"""Fewer bytes tell nothing about a link: most of their time is delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a fetch is, `elapsed_s` after it was asked for.

    `sample_bytes` came in `sample_s`, counted from the end of the first piece on: what
    passed before is mostly delay.
    """

    total_bytes: int
    received_bytes: int
    elapsed_s: float
    sample_bytes: int
    sample_s: float

    @property
    def projected_s(self) -> float:
        """When all will be there, at the rate of the sample; at once without one."""
        left = self.total_bytes - self.received_bytes
        if self.sample_bytes < SAMPLE_BYTES:
            return self.elapsed_s
        return self.elapsed_s + left * self.sample_s / self.sample_bytes


def worth_fetching(progress: Progress, limit_s: float) -> bool:
    """Whether the fetch will be over within `limit_s`, as far as one can tell."""
    return progress.projected_s <= limit_s
