"""Whether the other side of a stream still lives, judged by its answers to our beats.

A beat waits behind whatever was sent before it. So silence is allowed for longer
while bytes are under way that no answer has confirmed: as long as they take on the
slowest link that we serve. No clock in here: times are passed in, in seconds.
"""

from __future__ import annotations

from collections import deque

SLOWEST_BYTES_PER_S = 1 << 20
"""Half of what a link of 20 Mbit/s carries."""


class Pulse:
    """Counts our beats and what they confirm; `silence_s` is allowed on an idle link."""

    def __init__(self, silence_s: float, now_s: float) -> None:
        self._silence_s = silence_s
        self._heard_s = now_s
        self._beats = 0
        self._confirmed_bytes = 0
        self._sent: deque[tuple[int, int]] = deque()

    def beat(self, sent_bytes: int) -> int:
        """The number of the next beat; `sent_bytes` went out on the stream before it."""
        self._beats += 1
        self._sent.append((self._beats, sent_bytes))
        return self._beats

    def heard(self, now_s: float, number: int = 0) -> None:
        """Something came: the answer to beat `number`, or (0) anything else."""
        self._heard_s = now_s
        while self._sent and self._sent[0][0] <= number:
            self._confirmed_bytes = max(self._confirmed_bytes, self._sent.popleft()[1])

    def lost_at_s(self, sent_bytes: int) -> float:
        """When the other side counts as lost, if it says nothing until then.

        `sent_bytes` is what has gone out so far.
        """
        return self._heard_s + self._silence_s + self.way_s(sent_bytes)

    def way_s(self, sent_bytes: int) -> float:
        """How long what is under way may take; `sent_bytes` is what has gone out so far."""
        return max(0, sent_bytes - self._confirmed_bytes) / SLOWEST_BYTES_PER_S
