"""The sessions that this server holds, each with its links and what it holds.

A session outlives its streams. What belongs to one epoch of it (streams, secret,
next stage, what waits to be sent) is dropped when the next one begins; what it
holds goes on. All of this lives on the event loop; the KV is the compute thread's.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from bloombee.core import PackedTable, PeerId, SessionId
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    KVFull,
    ProtocolError,
    RequestError,
    StaleEpoch,
    Unsupported,
)
from bloombee.protocol.messages import Acknowledged, Attach, Open, Replay, Step, WireDtype
from bloombee.server.holdings import Holdings, Told
from bloombee.server.leases import Lease
from bloombee.server.mail import Mail
from bloombee.server.onward import Onward
from bloombee.server.traces import Times
from bloombee.server.validation import Limits, StepContext
from bloombee.server.window import Window
from bloombee.swarm.connection import Connection


@dataclass(frozen=True, slots=True)
class Arrived:
    """A step as it was read. `times` are on the monotonic clock, the others on the loop's.

    It may be taken from `not_before_s` on; nobody waits for it after `expires_s`.
    `looped`: it comes from the last stage, and not from the client or the stage before.
    """

    step: Step
    payload: memoryview
    times: Times
    not_before_s: float
    expires_s: float
    looped: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that the compute thread is done with, or that needs no computing any more."""

    step: Step
    told: Told
    payload_bytes: int
    times: Times
    expires_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that was not taken."""

    step: Step | Replay
    error: BloomBeeError
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A replay to serve from the journal; it counts `payload_bytes` in the window."""

    replay: Replay
    table: PackedTable
    payload_bytes: int
    expires_s: float


Outgoing = Finished | Refused | Asked | Acknowledged


class Session:
    """One client's session on this stage.

    `holds` says that its KV is reserved and is what `held` describes; `stands` that
    the epoch has begun: its client knows, steps may come. `client` is the client's own
    stream, None when that has ended. `onward` leads to the next stage, `upstream` comes
    from the one before. `ring` leads from the last stage to the first, where it arrives as
    `looped`. All are None where there is none.
    """

    def __init__(self, opening: Open, client: Connection, context: StepContext, lease: Lease):
        self.id = SessionId(opening.session)
        self.owner = client.remote
        self.clock = asyncio.get_running_loop().time
        self.lease = lease
        self.held = Holdings(context, opening.dtype, is_last=opening.next is None)
        self.holds = False
        self.free_tokens = 0
        self.opening: asyncio.Task[None] | None = None
        self.ended = False
        self._begin(opening, client, context)

    def _begin(self, opening: Open, client: Connection, context: StepContext) -> None:
        """Everything that is of one epoch only."""
        self.context = context
        self.wire_dtype: WireDtype = opening.dtype
        self.secret = opening.secret
        self.client: Connection | None = client
        self.upstream: Connection | None = None
        self.looped: Connection | None = None
        self.fed_by_client = False
        self.stands = False
        self.halted: BloomBeeError | None = None
        self.sent_step = 0
        self.telling_since_s = math.inf
        """Since when the client has been taking a message; infinite while it takes none."""
        self.window = Window()
        self.backlog: deque[Arrived] = deque()
        self.outbox: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.mail = Mail()
        self.client_is_timed = False
        """Whether the client times its beats, and so answers ours."""
        self.rows_told = False
        """Whether rows go to it, so that its way is worth measuring."""
        self.stages = opening.stages
        self.background = opening.background
        self.lossless = opening.lossless
        self.onward = None if opening.next is None else Onward(opening.next)
        self.ring = None if opening.ring is None else Onward(opening.ring, ring=True)

    @property
    def epoch(self) -> int:
        """The epoch it is in."""
        return self.context.terms.epoch

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after this one."""
        return self.onward is None

    @property
    def is_first(self) -> bool:
        """Whether its blocks begin with the model's first: ids come here."""
        return self.context.takes_ids

    @property
    def ways(self) -> list[Onward]:
        """To the stages that it sends steps to."""
        return [way for way in (self.onward, self.ring) if way is not None]

    def leads(self, way: Onward) -> bool:
        """Whether `way` is one of them, in the epoch of now."""
        return way is self.onward or way is self.ring

    @property
    def streams(self) -> list[Connection]:
        """Those that it has now."""
        links = (self.client, self.upstream, self.looped)
        onward = [way.link.connection for way in self.ways if way.link is not None]
        return [link for link in links if link is not None] + onward

    def is_fed_by(self, link: Connection) -> bool:
        """Whether `link` is a stream of another stage from which steps are taken."""
        return link is self.upstream or link is self.looped

    def advance(self, opening: Open, client: Connection, context: StepContext) -> list[Connection]:
        """Begin a later epoch, of whose Open `client` is the stream.

        Steps of older epochs are refused from now on, and what comes of those taken is
        sent nowhere. Returns the streams that are not needed any more.
        """
        dropped = [link for link in self.streams if link is not client]
        self.stop_tasks()
        self._begin(opening, client, context)
        self.held.book.begin_epoch()
        self.held.prompts = None
        self.lease.adopted()
        return dropped

    async def halt(self, why: BloomBeeError) -> None:
        """Take no further step in this epoch, and wait until those taken are computed."""
        self.halted = why
        await self.held.quiet()

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Let `task` run for as long as the current epoch."""
        tasks = self.tasks  # in order, so that what happens can be repeated
        tasks[task] = None
        task.add_done_callback(lambda _: tasks.pop(task, None))

    def stop_tasks(self) -> None:
        """End what runs for the current epoch."""
        for task in tuple(self.tasks):
            task.cancel()

    def attach(self, request: Attach, upstream: Connection) -> None:
        """Let `upstream` push steps into the session.

        Raises AuthError for a wrong secret, StaleEpoch for an earlier epoch,
        ProtocolError when someone else already feeds it.
        """
        if request.epoch < self.epoch:
            raise StaleEpoch(stale(request.epoch, self.epoch))
        if not hmac.compare_digest(request.secret, self.secret):
            raise AuthError("the secret does not open this session")
        if request.ring:
            if self.looped is not None or not self.is_first or self.is_last:
                raise ProtocolError("this is not where the route begins, or its loop is closed")
            self.looped = upstream
            return
        if self.upstream is not None or self.fed_by_client:
            raise ProtocolError("the session already gets its steps from elsewhere")
        self.upstream = upstream

    def detach(self, upstream: Connection) -> None:
        """The stream of `upstream` ended; the session stays until its client goes."""
        if self.upstream is upstream:
            self.upstream = None
        if self.looped is upstream:
            self.looped = None


def stale(theirs: int, ours: int) -> str:
    """What to say of a message of an earlier epoch."""
    return f"epoch {theirs} has passed, the session is at {ours}"


class Sessions:
    """The register of sessions; those that stand can be attached to."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entered: dict[SessionId, Session] = {}
        self._per_peer: Counter[PeerId] = Counter()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entered)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._entered.values()))

    def find(self, session: SessionId) -> Session | None:
        """The session of that id, if it is held."""
        return self._entered.get(session)

    def known(self, opening: Open, owner: PeerId) -> Session | None:
        """The session that `opening` takes to a later epoch, or None for a new one.

        Raises KVFull when there are as many as allowed, RequestError when it is someone
        else's, StaleEpoch or RequestError when it is not a later epoch.
        """
        session = self.find(SessionId(opening.session))
        if session is None:
            self._check_room(owner)
            return None
        if session.owner != owner:
            raise RequestError("a session with this id is open: choose another id")
        if opening.epoch < session.epoch:
            raise StaleEpoch(stale(opening.epoch, session.epoch))
        if opening.epoch == session.epoch:
            raise RequestError(f"the session is open already in epoch {session.epoch}")
        return session

    def _check_room(self, owner: PeerId) -> None:
        if len(self) >= self._limits.max_sessions:
            raise KVFull(
                f"this server holds its {self._limits.max_sessions} sessions: try another or later"
            )
        if self._per_peer[owner] >= self._limits.max_sessions_per_peer:
            raise KVFull(
                f"a peer may hold {self._limits.max_sessions_per_peer} sessions here: close some"
            )

    def enter(self, session: Session) -> None:
        """Count a new session in."""
        self._entered[session.id] = session
        self._per_peer[session.owner] += 1

    def stands(self) -> None:
        """Some session begins an epoch: whoever waits to attach may."""
        self._changed.set()
        self._changed = asyncio.Event()

    def leave(self, session: Session) -> None:
        """Count `session` out."""
        del self._entered[session.id]
        self._per_peer[session.owner] -= 1
        if not self._per_peer[session.owner]:
            del self._per_peer[session.owner]

    async def standing(self, session: SessionId, epoch: int, deadline_s: float) -> Session:
        """The session, once it stands in `epoch` or a later one.

        Raises RequestError when it doesn't within `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    held = self.find(session)
                    if held is not None and held.stands and held.epoch >= epoch:
                        return held
                    await self._changed.wait()
        except TimeoutError:
            raise RequestError(
                f"no such session was opened here within {deadline_s:g} s: open it on every stage"
            ) from None


def check_same(opening: Open, session: Session, context: StepContext) -> None:
    """Raise Unsupported when `opening` can't go on with what the session holds."""
    ours, theirs = session.context.terms, context.terms
    same = (
        (ours.span, ours.sequences, ours.max_length)
        == (theirs.span, theirs.sequences, theirs.max_length)
        and opening.dtype == session.wire_dtype
        and (opening.next is None) == session.is_last
    )
    if session.holds and not same:
        raise Unsupported("a session goes on with the terms it was opened with: open it anew")
