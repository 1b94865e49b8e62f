"""Who gets KV next: a pure policy over the requests that wait. No clock, no I/O, no torch.

The order. Peers take turns, one request each, and a peer's own requests stay in
the order of their arrival; a peer that was served, or is new, goes to the end of the
round. Sessions that come back to KV they had (parked ones) form a round of their own,
ahead of those of new sessions. Who asks for more than its share of the server has
left waits aside: that is between its own sessions.

Large requests. One that doesn't fit is passed by later ones that do, but only
`MOST_PASSES` times; being at the front of the new while returning ones are served
counts as well. Then it is due: due requests come before all others, in the order in
which they became due, and nothing passes them.

Nothing starves. Ahead of a request stand finitely many: no peer joins a round but at
its end, and of the due none but at theirs. Whoever is served ahead of it moves behind
it, and those behind it are served at most MOST_PASSES times before it is due, or those
ahead of it are. So it is served once enough of the sessions that stand have ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bloombee.core import PeerId, SessionId

MOST_PASSES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """`pages` of KV for a session of `peer`, which is `returning` to them or new."""

    peer: PeerId
    session: SessionId
    pages: int
    returning: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """Requests to serve now, in order, and how often each that waits was passed for it."""

    served: tuple[Request, ...]
    passed: Mapping[Request, int]


@dataclass(frozen=True, slots=True)
class Line:
    """The queue at one moment: requests in the order in which they are considered.

    `left` are the pages that each peer may still take (None: all).
    """

    order: tuple[Request, ...]
    passed: Mapping[Request, int]
    left: Mapping[PeerId, int] | None = None

    def in_its_share(self, request: Request) -> bool:
        """Whether the peer may have so much; what returns was never given up."""
        return request.returning or self.left is None or request.pages <= self.left[request.peer]

    def serve(self, free_pages: int) -> Round:
        """What can be served with so many free pages. Changes nothing."""
        served: list[Request] = []
        unfit: list[Request] = []
        passed = Counter(self.passed)
        left = dict(self.left) if self.left is not None else None
        halted: set[PeerId] = set()
        now = Line(self.order, passed, left)
        for request in self.order:
            if request.peer in halted:
                continue
            fits = request.pages <= free_pages
            if not (now.in_its_share(request) and fits):
                halted.add(request.peer)
                unfit += [request] if now.in_its_share(request) else []
                continue
            if any(passed[other] >= MOST_PASSES for other in unfit):
                break
            free_pages -= request.pages
            if left is not None and not request.returning:
                left[request.peer] -= request.pages
            served.append(request)
            passed.update([*unfit, *now.kept_waiting_by(request)])
        counts = {r: n - self.passed.get(r, 0) for r, n in passed.items() if r not in served}
        return Round(tuple(served), {request: count for request, count in counts.items() if count})

    def kept_waiting_by(self, served: Request) -> list[Request]:
        """The first new request within its share, when one that returns goes before it."""
        if not served.returning:
            return []
        new = (r for r in self.order if not r.returning and self.in_its_share(r))
        return [r for r in new if self.passed.get(r, 0) < MOST_PASSES][:1]


class FairQueue:
    """The requests that wait. One peer may hold `peer_pages` in all (None: no limit)."""

    def __init__(self, peer_pages: int | None = None) -> None:
        self._peer_pages = peer_pages
        self._returning = _Turns()
        self._new = _Turns()
        self._due: list[Request] = []
        self._passed: Counter[Request] = Counter()
        self._members: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def enter(self, request: Request) -> None:
        """Let it wait behind its peer's others."""
        self._members[request] = None
        self._turns(request).add(request)

    def withdraw(self, request: Request) -> None:
        """It waits no longer; its peer keeps its place in the round."""
        self._forget(request)
        self._turns(request).remove(request)

    def serve(self, request: Request) -> None:
        """It got its pages; its peer goes to the end of the round."""
        self._forget(request)
        turns = self._turns(request)
        turns.remove(request)
        turns.move_back(request.peer)

    def count_passes(self, passed: Mapping[Request, int]) -> None:
        """Requests were passed so often; those that were too often are due from now on."""
        for request, count in passed.items():
            if request in self._members:
                self._passed[request] += count
                if self._passed[request] >= MOST_PASSES and request not in self._due:
                    self._due.append(request)

    def line(self, held_pages: Mapping[PeerId, int]) -> Line:
        """The queue as it stands, for peers that hold so many pages already."""
        left = None
        if self._peer_pages is not None:
            peers = {request.peer for request in self._members}
            left = {peer: self._peer_pages - held_pages.get(peer, 0) for peer in peers}
        order = (
            *self._due,
            *self._returning.order(self._due),
            *self._new.order(self._due),
        )
        return Line(order, dict(self._passed), left)

    def _turns(self, request: Request) -> _Turns:
        return self._returning if request.returning else self._new

    def _forget(self, request: Request) -> None:
        del self._members[request]
        self._passed.pop(request, None)
        if request in self._due:
            self._due.remove(request)


class _Turns:
    """Peers in the order of their turns, each with its own line."""

    def __init__(self) -> None:
        self._lines: OrderedDict[PeerId, deque[Request]] = OrderedDict()

    def add(self, request: Request) -> None:
        self._lines.setdefault(request.peer, deque()).append(request)

    def remove(self, request: Request) -> None:
        line = self._lines[request.peer]
        line.remove(request)
        if not line:
            del self._lines[request.peer]

    def move_back(self, peer: PeerId) -> None:
        if peer in self._lines:
            self._lines.move_to_end(peer)

    def order(self, served_before: Iterable[Request]) -> Iterator[Request]:
        """All requests but `served_before`, as they take turns after those were served."""
        lines = OrderedDict((peer, deque(line)) for peer, line in self._lines.items())
        for request in served_before:
            if request.peer in lines and request in lines[request.peer]:
                lines[request.peer].remove(request)
                lines.move_to_end(request.peer)
        while lines:
            for peer in list(lines):
                if lines[peer]:
                    yield lines[peer].popleft()
                else:
                    del lines[peer]
