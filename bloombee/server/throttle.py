"""How many messages a second one peer may send: a token bucket for each. No clock inside."""

from __future__ import annotations

from dataclasses import dataclass

from bloombee.core import PeerId

FORGET_ABOVE = 1024
"""Never more peers than this are remembered."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


class Throttle:
    """Tells how long a peer's next message has to wait; a second's worth may come at once.

    What waits is not kept here: a peer is not read from meanwhile, or only so far.
    """

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

    def __len__(self) -> int:
        """How many peers are remembered."""
        return len(self._buckets)

    def _forget(self, now_s: float) -> None:
        """Drop peers whose bucket is full again, once there are many; half of them if none is.

        Those go that owe least: forgetting gives a peer one full bucket at most.
        """
        if len(self._buckets) < FORGET_ABOVE:
            return
        filled = {
            peer: bucket.tokens + (now_s - bucket.filled_s) * self._rate
            for peer, bucket in self._buckets.items()
        }
        kept = [peer for peer, tokens in filled.items() if tokens < self._rate]
        if len(kept) >= FORGET_ABOVE:
            kept = sorted(kept, key=lambda peer: filled[peer])[: FORGET_ABOVE // 2]
        self._buckets = {peer: self._buckets[peer] for peer in kept}
