"""Items for the scheduler, and a bench on which their passes run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bloombee.core import PeerId, Phase, SessionId, Span
from bloombee.server.scheduler import Budget, Scheduler, WorkItem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fifo import Fifo

A, B, C = (SessionId(bytes([letter]) * 16) for letter in b"ABC")
SPAN, OTHER = Span(0, 4), Span(0, 2)
BUDGET = Budget(64, 16)


def work(
    arrival: int,
    session: SessionId = A,
    phase: Phase = Phase.DECODE,
    tokens: int = 1,
    touches: Iterable[int] = (0,),
) -> WorkItem:
    return WorkItem(
        arrival=arrival,
        session=session,
        step=arrival + 1,
        phase=phase,
        span=SPAN,
        tokens=tokens,
        touches=frozenset(touches),
        client=PeerId(session.decode()[:1]),
    )


def prompt(arrival: int, session: SessionId, tokens: int) -> WorkItem:
    return work(arrival, session, Phase.PREFILL, tokens)


def tree(arrival: int, session: SessionId, tokens: int) -> WorkItem:
    return replace(work(arrival, session, Phase.VERIFY, tokens), divisible=False)


@dataclass
class Bench:
    """A scheduler with its queue; `run` carries out one pass, as the executor does."""

    scheduler: Scheduler | Fifo = field(default_factory=lambda: Scheduler(BUDGET))
    queue: list[WorkItem] = field(default_factory=list)
    finished: list[WorkItem] = field(default_factory=list)

    def run(self) -> list[tuple[int, int]]:
        """One pass: (arrival, tokens) of its shares."""
        shares = self.scheduler.next_batch(self.queue)
        tokens = {share.item.arrival: share.tokens for share in shares}
        assert len(tokens) == len(shares)
        left = [replace(i, tokens=i.tokens - tokens.get(i.arrival, 0)) for i in self.queue]
        assert all(item.tokens >= 0 for item in left)
        self.finished += [share.item for share in shares if share.finishes]
        self.queue = [item for item in left if item.tokens]
        return list(tokens.items())

    def drain(self) -> list[list[tuple[int, int]]]:
        """All passes until nothing waits."""
        passes: list[list[tuple[int, int]]] = []
        while self.queue:
            passes.append(self.run())
        return passes


def batch(arrival: int, session: SessionId, rows: int) -> WorkItem:
    return work(arrival, session, Phase.DECODE, rows, range(rows))
