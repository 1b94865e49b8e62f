"""The sessions that this server holds, each with its links and its sequences.

All of this lives on the event loop; the KV itself is the compute thread's.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bloombee.core import PeerId, SessionId
from bloombee.errors import (
    AuthError,
    ProtocolError,
    RequestError,
    StaleEpoch,
    Unsupported,
)
from bloombee.protocol.messages import Attach, Hop, Open, Step, WireDtype
from bloombee.server.sequences import SequenceBook
from bloombee.server.validation import Limits, StepContext
from bloombee.server.work import Outcome
from bloombee.swarm.connection import Connection

IN_FLIGHT_BYTES = 64 << 20
"""What one session may have waiting on this server before we stop reading from it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that the compute thread is done with. Times are on the monotonic clock."""

    step: Step
    outcome: Outcome
    payload_bytes: int
    taken_us: int
    decode_us: int


class Window:
    """How many bytes are in flight; one task at a time may wait for room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._freed = asyncio.Event()

    async def enter(self, count_bytes: int) -> None:
        """Wait until they fit; anything fits an empty window."""
        while self._used and self._used + count_bytes > self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._used += count_bytes

    def leave(self, count_bytes: int) -> None:
        """Make room again."""
        self._used -= count_bytes
        self._freed.set()


class Session:
    """One client's session on this stage.

    `client` is the client's own stream. `downstream` leads to the next stage,
    `upstream` comes from the one before; both are None where there is none.
    `broken` says why no step can follow, or is empty.
    """

    def __init__(self, opening: Open, client: Connection, context: StepContext) -> None:
        self.id = SessionId(opening.session)
        self.owner = client.remote
        self.context = context
        self.wire_dtype: WireDtype = opening.dtype
        self.next: Hop | None = opening.next
        self.client = client
        self.downstream: Connection | None = None
        self.upstream: Connection | None = None
        self.fed_by_client = False
        self.broken = ""
        self.book = SequenceBook(context.terms)
        self.window = Window(IN_FLIGHT_BYTES)
        self.outbox: asyncio.Queue[Finished] = asyncio.Queue()
        self.secret = opening.secret

    @property
    def epoch(self) -> int:
        """The epoch it was opened in."""
        return self.context.terms.epoch

    @property
    def next_name(self) -> str:
        """The next stage, for messages."""
        if self.next is None:
            return "no next stage"
        return f"the next stage, {self.next.address or self.next.peer}"

    def attach(self, request: Attach, upstream: Connection) -> None:
        """Let `upstream` push steps into the session.

        Raises AuthError for a wrong secret, StaleEpoch or Unsupported for another
        epoch, ProtocolError when someone else already feeds it.
        """
        if not hmac.compare_digest(request.secret, self.secret):
            raise AuthError("the secret does not open this session")
        check_epoch(request.epoch, self.epoch)
        if self.upstream is not None or self.fed_by_client:
            raise ProtocolError("the session already gets its steps from elsewhere")
        self.upstream = upstream

    def detach(self, upstream: Connection) -> None:
        """The stream of `upstream` ended; the session stays until its client goes."""
        if self.upstream is upstream:
            self.upstream = None


def check_epoch(theirs: int, ours: int) -> None:
    """Raise StaleEpoch or Unsupported unless the epochs are the same."""
    if theirs < ours:
        raise StaleEpoch(f"epoch {theirs} has passed, the session is at {ours}")
    if theirs > ours:
        raise Unsupported(f"epoch {theirs} of a session opened in {ours}: open a new session")


class Sessions:
    """The register of sessions; those that stand (KV reserved) can be attached to."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entered: dict[SessionId, Session] = {}
        self._standing: dict[SessionId, Session] = {}
        self._per_peer: Counter[PeerId] = Counter()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entered)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._entered.values()))

    def enter(self, session: Session) -> None:
        """Count `session` in.

        Raises RequestError, StaleEpoch or Unsupported when its id is taken or
        there are as many sessions as allowed.
        """
        known = self._entered.get(session.id)
        if known is not None:
            check_epoch(session.epoch, known.epoch)
            raise RequestError("a session with this id is open: choose another id")
        if len(self) >= self._limits.max_sessions:
            raise RequestError(
                f"this server holds its {self._limits.max_sessions} sessions: try another or later"
            )
        if self._per_peer[session.owner] >= self._limits.max_sessions_per_peer:
            raise RequestError(
                f"a peer may hold {self._limits.max_sessions_per_peer} sessions here: close some"
            )
        self._entered[session.id] = session
        self._per_peer[session.owner] += 1

    def stands(self, session: Session) -> None:
        """Its KV is reserved: whoever waits to attach may."""
        self._standing[session.id] = session
        self._changed.set()
        self._changed = asyncio.Event()

    def leave(self, session: Session) -> None:
        """Count `session` out."""
        del self._entered[session.id]
        self._standing.pop(session.id, None)
        self._per_peer[session.owner] -= 1
        if not self._per_peer[session.owner]:
            del self._per_peer[session.owner]

    async def standing(self, session: SessionId, deadline_s: float) -> Session:
        """The session, once it stands.

        Raises RequestError when it doesn't within `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while session not in self._standing:
                    await self._changed.wait()
        except TimeoutError:
            raise RequestError(
                f"no such session was opened here within {deadline_s:g} s: open it on every stage"
            ) from None
        return self._standing[session]
