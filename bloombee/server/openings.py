"""How sessions begin, go on in a later epoch, and end.

`admit` decides at once (who, which epoch, how many) and marks the change: from then
on older epochs are refused. `stand` waits for what the session had taken, empties it
if it starts anew, reserves its KV, and tells its client. `end` gives all of it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bloombee.errors import BloomBeeError, PeerStopping, RequestError
from bloombee.protocol.messages import Chain, Hop, Open, Opened, Source
from bloombee.server.admission import Admission
from bloombee.server.carried import Carried
from bloombee.server.carried import Terms as CarriedTerms
from bloombee.server.downstream import Downstream
from bloombee.server.holdings import Holdings, carried_terms
from bloombee.server.leases import Lease
from bloombee.server.live_rows import LiveRows
from bloombee.server.sending import Sending
from bloombee.server.sessions import Session, Sessions, check_same
from bloombee.server.tasks import BackgroundTasks
from bloombee.server.validation import Limits, Offer, StepContext, check_open
from bloombee.swarm.connection import Connection

logger = logging.getLogger(__name__)

SWEEP_S = 0.1
"""Between two looks at which leases are over."""
SEND_DEADLINE_S = 60.0
"""For a client to take one message."""

Adopt = Callable[[Session, Sequence[Chain]], Awaitable[None]]
"""Fills the reserved, empty KV of a session with what is kept of its prompts."""
Fetch = Callable[[CarriedTerms, Source], Awaitable[Carried | None]]
"""Fills the reserved, empty KV of a session from another server, and returns the rest of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningParts:
    """What opening sessions takes. Without `fetch` and `adopt` they start empty."""

    offer: Offer
    limits: Limits
    sessions: Sessions
    admission: Admission
    live_rows: LiveRows
    sending: Sending
    downstream: Downstream
    tasks: BackgroundTasks
    fetch: Fetch | None = None
    adopt: Adopt | None = None


class Openings:
    """Begins and ends sessions. `refusal`, when set, answers every Open of an unknown session."""

    def __init__(self, parts: OpeningParts) -> None:
        self._parts = parts
        self.refusal: PeerStopping | None = None

    def admit(self, client: Connection, opening: Open) -> Session:
        """The session that `opening` begins, or takes to a later epoch; it doesn't stand yet.

        Raises what `check_open`, `Sessions.known` and `check_same` raise; nothing
        changes then.
        """
        parts = self._parts
        terms = check_open(opening, parts.offer, parts.limits)
        context = StepContext(
            terms,
            parts.offer.hidden_size,
            parts.limits.max_step_tokens,
            vocab_size=parts.offer.vocab_size,
            last_block=parts.offer.ends_with(terms.span.end),
        )
        session = parts.sessions.known(opening, client.remote)
        if session is None:
            if self.refusal is not None:
                raise self.refusal
            lease = Lease(parts.limits.lease_s, asyncio.get_running_loop().time())
            session = Session(opening, client, context, lease)
            parts.sessions.enter(session)
            return session
        if opening.resume:
            check_same(opening, session, context)
        session.lease.heard_s = asyncio.get_running_loop().time()
        for link in session.advance(opening, client, context):
            parts.tasks.start(link.close(), "closing a stream of an earlier epoch")
        return session

    async def stand(self, session: Session, opening: Open, client: Connection) -> None:
        """Bring an admitted session to where steps may come, and tell its client.

        Runs as `session.opening`; one that still runs for an earlier epoch is ended
        first. Raises KVFull, RequestError, PeerStopping, TransportError.
        """
        await self._supersede(session)
        if session.ended:
            raise RequestError("the session has ended meanwhile: open it anew")
        await session.held.quiet()
        if not (opening.resume and session.holds and not session.held.broken):
            await self._start_empty(session, opening)
        opened = Opened(
            session=session.id,
            epoch=opening.epoch,
            held_tokens=session.held.book.lengths,
            free_tokens=session.free_tokens,
            max_step_tokens=self._parts.limits.max_step_tokens,
            newest_steps=session.held.book.newest_steps,
        )
        await client.send(opened)
        session.stands = True
        self._parts.sessions.stands()
        tasks, parts = self._parts.tasks, self._parts
        session.keep_task(tasks.start(parts.sending.run(session), "sending on"))
        if session.is_last:
            session.keep_task(tasks.start(parts.sending.deliver(session), "telling of tokens"))
        for way in session.ways:
            link = parts.downstream.run(session, way)
            session.keep_task(tasks.start(link, f"the link to {way}"))

    def prepare(self, hop: Hop) -> None:
        """Keep the way to a server short that may become a session's next stage."""
        parts = self._parts
        parts.tasks.start(parts.downstream.prepare(hop), "a way to who may be a next stage")

    async def end(self, session: Session) -> None:
        """Free what a session holds, and end its streams but its client's. Once is enough."""
        if session.ended:
            return
        session.ended = True
        session.stands = False
        parts = self._parts
        parts.sessions.leave(session)
        parts.live_rows.left(session.id)
        session.stop_tasks()
        if session.opening is not None and session.opening is not asyncio.current_task():
            session.opening.cancel()
        freed = self._free(session)
        for link in session.streams:
            if link is not session.client:
                parts.tasks.start(link.close(), "closing a stream of an ended session")
        await freed

    def abandon(self, session: Session) -> None:
        """End a session whose client left before it stood."""
        self._parts.tasks.start(self.end(session), "ending a session")

    async def sweep(self) -> None:
        """End sessions whose lease is over, for as long as the server runs."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = loop.time()
            self._parts.live_rows.sweep(now_s)
            for session in self._parts.sessions:
                stuck = now_s - session.telling_since_s > SEND_DEADLINE_S
                if stuck or session.lease.is_over(now_s):
                    logger.info("a session of %s ended: its client is gone", session.owner)
                    self._parts.tasks.start(self._expire(session), "ending a session")

    async def _expire(self, session: Session) -> None:
        client = session.client
        await self.end(session)
        if client is not None:
            await client.close()

    async def _supersede(self, session: Session) -> None:
        """Make this task the one that opens the session; the one before ends first."""
        earlier, session.opening = session.opening, asyncio.current_task()
        if earlier is not None and not earlier.done():
            earlier.cancel()
            await asyncio.wait([earlier])

    async def _start_empty(self, session: Session, opening: Open) -> None:
        """Give up what it holds, and reserve anew; or take over what another server holds."""
        session.free_tokens = await self._reserve(session, opening.wait_s)
        session.held = self._empty(session)
        session.holds = True
        if opening.prefixes and self._parts.adopt is not None:
            session.holds = False  # until all of it is here
            async with self._parts.admission.use(session.id, 0):
                await self._parts.adopt(session, opening.prefixes)
            session.holds = True
        elif opening.source is not None and self._parts.fetch is not None:
            await self._take_over(session, opening, self._parts.fetch, opening.source)

    async def _take_over(
        self, session: Session, opening: Open, fetch: Fetch, source: Source
    ) -> None:
        """Take over what another server holds, if it can be had."""
        # Until all of it is here, another epoch must start empty.
        session.holds = False
        terms = carried_terms(session.id, session.context, session.wire_dtype)
        async with self._parts.admission.use(session.id, 0):
            carried = await fetch(terms, source)
        if carried is not None:
            try:
                session.held.restore(carried)
            except BloomBeeError as error:
                logger.info("what was fetched of a session is of no use: %s", error)
                session.free_tokens = await self._reserve(session, opening.wait_s)
                session.held = self._empty(session)
        session.holds = True

    def _empty(self, session: Session) -> Holdings:
        return Holdings(session.context, session.wire_dtype, is_last=session.is_last)

    # The only places where KV is reserved and freed.

    async def _reserve(self, session: Session, wait_s: float) -> int:
        """Empty KV for the session's terms, for all it had; the tokens that are free after it."""
        session.holds = False
        terms = session.context.terms
        return await self._parts.admission.renew(
            session.owner, session.id, terms.sequences, terms.max_length, wait_s
        )

    def _free(self, session: Session) -> asyncio.Future[None]:
        """Everything the session has reserved, if anything."""
        session.holds = False
        return self._parts.admission.free(session.id)
