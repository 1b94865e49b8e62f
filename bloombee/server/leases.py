"""How long a session is kept without a word of its client. No clock: times are passed in."""

from __future__ import annotations

import math

ORPHAN_S = 0.7
"""After a client's stream has ended without a Close, for it to come back on another."""


class Lease:
    """Runs for `lease_s` after each word of the client, for `ORPHAN_S` after its stream."""

    __slots__ = ("_ends_s", "_lease_s", "heard_s")

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._lease_s = lease_s
        self.heard_s = now_s
        """When the client said something last; whoever reads its stream sets it."""
        self._ends_s = math.inf

    def orphaned(self, now_s: float) -> None:
        """The client's stream has ended."""
        self._ends_s = now_s + ORPHAN_S

    def adopted(self) -> None:
        """The client has come back."""
        self._ends_s = math.inf

    def is_over(self, now_s: float) -> bool:
        """Whether the session is to end."""
        return now_s >= min(self._ends_s, self.heard_s + self._lease_s)
