"""How many sequences decode on this server, and so how many of them may share a pass.

A stage that merged all micro-batches that pass through it would send them on together,
and the other stages of the route would idle meanwhile. So a pass takes its share: with as
many stages as the longest route has, each of them finds the next share waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bloombee.core import SessionId

IDLE_S = 10.0
"""Without a step for so long a session counts no more. On slow links a token may take seconds."""


@dataclass(slots=True)
class _Live:
    rows: int
    stages: int
    seen_s: float


class LiveRows:
    """Counts the rows of the newest decode step of each session; `tell` gets the share."""

    def __init__(self, tell: Callable[[int | None], None]) -> None:
        self._tell = tell
        self._told: int | None = None
        self._live: dict[SessionId, _Live] = {}

    @property
    def rows(self) -> int:
        """How many sequences decode."""
        return sum(live.rows for live in self._live.values())

    def decoded(self, session: SessionId, rows: int, stages: int, now_s: float) -> None:
        """A session on a route of `stages` takes a decode step of `rows`."""
        live = self._live.get(session)
        if live is None:
            self._live[session] = _Live(rows, stages, now_s)
        else:
            live.seen_s = now_s
            if (live.rows, live.stages) == (rows, stages):
                return
            live.rows, live.stages = rows, stages
        self._update()

    def left(self, session: SessionId) -> None:
        """A session has ended."""
        if self._live.pop(session, None) is not None:
            self._update()

    def sweep(self, now_s: float) -> None:
        """Forget who has not decoded for a while."""
        for session in [s for s, live in self._live.items() if now_s - live.seen_s > IDLE_S]:
            self.left(session)

    def _update(self) -> None:
        stages = max((live.stages for live in self._live.values()), default=1)
        share = math.ceil(self.rows / stages) if stages > 1 else None
        if share != self._told:
            self._told = share
            self._tell(share)
