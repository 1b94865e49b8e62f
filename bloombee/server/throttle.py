"""How many messages a second one peer may send: a token bucket for each. No clock inside."""

from __future__ import annotations

from dataclasses import dataclass

from bloombee.core import PeerId

FORGET_ABOVE = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


class Throttle:
    """Tells how long a peer's next message has to wait; a second's worth may come at once."""

    def __init__(self, messages_per_s: int) -> None:
        self._rate = messages_per_s
        self._buckets: dict[PeerId, _Bucket] = {}

    def delay_s(self, peer: PeerId, now_s: float) -> float:
        """Count one message of `peer`; 0 when it may pass now."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            self._forget(now_s)
            bucket = self._buckets[peer] = _Bucket(self._rate, now_s)
        passed_s = now_s - bucket.filled_s
        bucket.tokens = min(self._rate, bucket.tokens + passed_s * self._rate) - 1
        bucket.filled_s = now_s
        return max(0.0, -bucket.tokens / self._rate)

    def _forget(self, now_s: float) -> None:
        """Drop peers whose bucket is full again, once there are many."""
        if len(self._buckets) >= FORGET_ABOVE:
            self._buckets = {
                peer: bucket
                for peer, bucket in self._buckets.items()
                if bucket.tokens + (now_s - bucket.filled_s) * self._rate < self._rate
            }
