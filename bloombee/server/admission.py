"""Who may hold KV, and who waits for it.

Every session reserves here and is freed here. A request enters the `fair_queue`, and
`rounds` serve it when the pages that are free allow. A caller that is cancelled or
gives up leaves nothing behind. While requests wait, the longest idle sessions are
parked for them (`parking`), piece by piece, by those who wait.

Before a step, a parked session is brought back, which waits in the same queue. Time is
the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

from bloombee.core import PeerId, SessionId, Span
from bloombee.errors import KVFull, RequestError
from bloombee.kv.interface import KVPool
from bloombee.server.executor import Executor
from bloombee.server.fair_queue import MOST_PASSES, Request
from bloombee.server.parking import Holding, Parking
from bloombee.server.rounds import Rounds, Waiter
from bloombee.server.validation import Limits
from bloombee.server.work import Outcome

Done = Callable[[Outcome], None]
"""What the compute thread has the event loop call once a step is done."""

LEAST_PAUSE_S = 0.05
"""Between two looks of a waiting request at whether someone could be parked."""


class Admission:
    """Reserves and frees the KV of sessions, fairly. Lives on the event loop."""

    def __init__(self, executor: Executor, pool: KVPool, limits: Limits) -> None:
        """`pool` is only asked for its sizes; the compute thread does the rest."""
        self._executor = executor
        self._limits = limits
        self._page_tokens = pool.page_tokens
        self._total_tokens = pool.total_tokens
        share = limits.max_tokens_per_peer
        peer_pages = None if share is None else share // pool.page_tokens
        self._holdings: dict[SessionId, Holding] = {}
        self._held_pages: Counter[PeerId] = Counter()
        self._rounds = Rounds(executor, peer_pages, self._held_pages, self._grant)
        self._parking = Parking(executor, pool.shape, limits.park_bytes, self._rounds.changed)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._rounds)

    @property
    def parked(self) -> int:
        """How many sessions are parked."""
        return self._parking.parked

    # Sessions ------------------------------------------------------------------

    async def reserve(
        self, peer: PeerId, session: SessionId, sequences: int, max_length: int, wait_s: float
    ) -> int:
        """Reserve KV of a session of `peer`; returns how many tokens are free after it.

        Waits its turn for up to `wait_s` and `Limits.max_wait_s`; 0 asks once. Raises
        KVFull after that, RequestError when the session is open or asks for more
        than it could ever get, PeerStopping. When cancelled, nothing stays reserved.
        """
        pages = -(-max_length // self._page_tokens)
        holding = Holding(peer, session, sequences, max_length, pages)
        self._check(holding)
        return await self._queued(Request(peer, session, holding.pages), holding, wait_s)

    async def renew(
        self, peer: PeerId, session: SessionId, sequences: int, max_length: int, wait_s: float
    ) -> int:
        """Empty KV for a session that starts anew; returns the tokens that are free then.

        On the terms that it had before it keeps its pages, or, parked, its place before
        new sessions. Otherwise, and for an unknown one, this is `reserve`. No step of
        the session may be waiting. Raises what `reserve` raises; it holds nothing then.
        """
        holding = self._holdings.get(session)
        if holding is not None and (holding.released or not holding.has(sequences, max_length)):
            await self.free(session)
            holding = None
        if holding is None:
            return await self.reserve(peer, session, sequences, max_length, wait_s)
        self._begin_use(holding)
        try:
            async with holding.returning:
                return await self._emptied(holding, wait_s)
        finally:
            self._end_use(holding)

    async def _emptied(self, holding: Holding, wait_s: float) -> int:
        if holding.saved is None:
            return await self._executor.call(partial(_empty, holding))
        self._parking.drop(holding)
        try:
            return await self._queued(_return_of(holding), holding, wait_s)
        except BaseException:
            self.free(holding.session)
            raise

    def free(self, session: SessionId) -> asyncio.Future[None]:
        """Give all of a session's KV back, parked or not; the future is done when it is.

        Its steps that wait fail with RequestError.
        """
        holding = self._holdings.pop(session, None)
        if holding is not None:
            holding.closed = True
            self._count(holding.peer, -holding.pages)
            self._parking.drop(holding)
            for waiter in self._rounds.of(holding):
                self._rounds.fail(waiter, RequestError("the session was closed"))
        freed = self._executor.free(session)
        freed.add_done_callback(lambda _: self._rounds.changed())
        return freed

    def is_away(self, session: SessionId) -> bool:
        """Whether its KV is not in the pool: it has to be brought back before a step."""
        holding = self._holdings.get(session)
        return holding is not None and holding.saved is not None

    async def bring_back(self, session: SessionId, wait_s: float) -> None:
        """Have a parked session's KV in the pool; it then stays there for `park_idle_s`.

        Waits its turn as in `reserve`. Raises KVFull (it stays parked then),
        RequestError when it isn't open, PeerStopping.
        """
        async with self.use(session, wait_s):
            pass

    @asynccontextmanager
    async def use(self, session: SessionId, wait_s: float) -> AsyncIterator[None]:
        """Keep a session's KV in the pool, brought back first. Raises what `bring_back` does."""
        holding = self._holdings.get(session)
        if holding is None:
            raise RequestError("the session holds no KV here; open it first")
        self._begin_use(holding)
        try:
            async with holding.returning:
                if holding.saved is not None:
                    await self._return(holding, wait_s)
            yield
        finally:
            self._end_use(holding)

    def begin_step(
        self, session: SessionId, span: Span, releases: tuple[int, ...], done: Done
    ) -> Done:
        """Keep the KV of a session that isn't away in the pool, until what it returns is called.

        That is what the compute thread is to call in place of `done`.
        """
        holding = self._holdings.get(session)
        if holding is None:
            return done  # the compute thread knows what is wrong
        holding.span = span
        self._begin_use(holding)

        def ended(outcome: Outcome) -> None:
            if releases and outcome.error is None:
                self._release(holding, releases)
            self._end_use(holding)
            done(outcome)

        return ended

    def released(self, session: SessionId, sequences: Iterable[int]) -> None:
        """Count sequences out that were released in the pool otherwise than by a step."""
        holding = self._holdings.get(session)
        if holding is not None:
            self._release(holding, tuple(sequences))

    def _begin_use(self, holding: Holding) -> None:
        holding.uses += 1
        holding.begun += 1
        holding.size_bytes = 0  # it may change now

    def _end_use(self, holding: Holding) -> None:
        """When none is left the session idles."""
        holding.uses -= 1
        holding.idle_since_s = asyncio.get_running_loop().time()

    def _release(self, holding: Holding, sequences: tuple[int, ...]) -> None:
        fresh = set(sequences) - holding.released
        if fresh and not holding.closed:
            holding.released |= fresh
            self._count(holding.peer, -len(fresh) * holding.pages_each)
            self._rounds.changed()

    def _count(self, peer: PeerId, pages: int) -> None:
        self._held_pages[peer] += pages
        if not self._held_pages[peer]:
            del self._held_pages[peer]

    def _check(self, holding: Holding) -> None:
        """Raise RequestError for what can never be served."""
        if holding.session in self._holdings:
            raise RequestError("a session with this id holds KV already: choose another id")
        asked = holding.pages * self._page_tokens
        what = (
            f"{asked} KV tokens asked for ({holding.sequences} sequences of "
            f"{holding.max_length}, in pages of {self._page_tokens})"
        )
        if asked > self._total_tokens:
            raise RequestError(f"{what}: this server has {self._total_tokens} in all")
        share = self._limits.max_tokens_per_peer
        if share is not None and asked > share // self._page_tokens * self._page_tokens:
            raise RequestError(f"{what}: a peer may hold {share} on this server")

    # Waiting -------------------------------------------------------------------

    async def _return(self, holding: Holding, wait_s: float) -> None:
        await self._queued(_return_of(holding), holding, wait_s)
        try:
            await self._parking.load_back(holding)
        except BaseException:
            self._give_back(holding)
            raise

    async def _queued(self, request: Request, holding: Holding, wait_s: float) -> int:
        """Wait until `request` is served. Raises KVFull after `wait_s`; then it is gone."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        wait_s = max(0.0, min(wait_s, self._limits.max_wait_s))
        waiter = self._rounds.enter(request, holding)
        try:
            try:
                async with asyncio.timeout_at(began_s + wait_s if wait_s else None):
                    return await self._granted(waiter, once=not wait_s)
            except TimeoutError:
                if waiter.granted.done():
                    return waiter.granted.result()
                raise self._full(waiter, loop.time() - began_s) from None
        except BaseException:
            self._withdraw(waiter)
            raise

    async def _granted(self, waiter: Waiter, *, once: bool) -> int:
        """What it is granted; meanwhile, park who idles. TimeoutError when asked `once` only."""
        await waiter.tried.wait()
        while not waiter.granted.done():
            if once:
                raise TimeoutError
            waiter.tried.clear()
            if (victim := self._victim()) is not None:
                await self._parking.advance(victim)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await waiter.tried.wait()
        return waiter.granted.result()

    def _withdraw(self, waiter: Waiter) -> None:
        """The caller went or gave up: undo what it asked for, or got just now."""
        waited = self._rounds.withdraw(waiter)
        if not waited and waiter.granted.done() and waiter.granted.exception() is None:
            if waiter.request.returning:
                self._give_back(waiter.holding)
            elif not waiter.holding.closed:
                self.free(waiter.request.session)
        if not self._rounds:
            self._parking.abandon()

    def _give_back(self, holding: Holding) -> None:
        """Free the pool's pages of a session that stays parked."""
        if not holding.closed:
            freed = self._executor.free(holding.session)
            freed.add_done_callback(lambda _: self._rounds.changed())

    def _full(self, waiter: Waiter, waited_s: float) -> KVFull:
        request, held = waiter.request, waiter.holding
        line = self._rounds.line()
        asked = f"{request.pages * self._page_tokens} asked for"
        waited = f"waited {waited_s:.1f} s"
        if not line.in_its_share(request):
            left = (line.left or {})[request.peer] * self._page_tokens
            return KVFull(
                f"{max(0, left)} tokens left of the {self._limits.max_tokens_per_peer} that a peer "
                f"may hold here, {asked}, {waited}; close a session, or ask another server"
            )
        if waiter.refusal is not None:
            return KVFull(f"{waiter.refusal}; {waited}")
        ahead = line.order.index(request)
        behind = f" behind {ahead} other requests" if ahead else ""
        live = held.sequences - len(held.released)
        return KVFull(
            f"{self._rounds.free_tokens} tokens free, {asked} ({live} sequences of "
            f"{held.max_length}){behind}, {waited}; ask another server, or later"
        )

    def _grant(self, waiter: Waiter) -> None:
        holding = waiter.holding
        holding.idle_since_s = asyncio.get_running_loop().time()
        if not waiter.request.returning:
            self._holdings[holding.session] = holding
            self._count(holding.peer, waiter.request.pages)

    # Parking -------------------------------------------------------------------

    def _victim(self) -> Holding | None:
        """The session to park now: the longest idle one, if that lets somebody in."""
        if self._parking.busy or self._rounds.running:
            return None
        idle = self._limits.park_idle_s
        longest = asyncio.get_running_loop().time() - idle
        able = [
            one
            for one in self._holdings.values()
            if not one.uses and one.idle_since_s <= longest and self._parking.fits(one)
        ]
        able.sort(key=lambda one: one.idle_since_s)
        reach = self._rounds.free_tokens // self._page_tokens + sum(one.pages for one in able)
        return self._parking.prefers(able) if able and self._helps(reach) else None

    def _helps(self, reach_pages: int) -> bool:
        """Whether someone who waits could be served with so many pages."""
        line = self._rounds.line()
        for request in line.order:
            if line.in_its_share(request):
                if request.pages <= reach_pages:
                    return True
                if line.passed.get(request, 0) >= MOST_PASSES:
                    return False
        return False

    def _pause_s(self) -> float:
        """Until someone may have been idle for long enough.

        Who becomes idle after this look is so at the earliest after a whole `park_idle_s`.
        """
        if self._parking.busy:
            return LEAST_PAUSE_S  # whoever is at it may go
        now, idle = asyncio.get_running_loop().time(), self._limits.park_idle_s
        dues = [h.idle_since_s + idle - now for h in self._holdings.values() if not h.uses]
        return max(LEAST_PAUSE_S, min([due for due in dues if due > 0], default=idle))


def _return_of(holding: Holding) -> Request:
    return Request(holding.peer, holding.session, holding.pages, returning=True)


def _empty(holding: Holding, pool: KVPool) -> int:
    """Give the session's pages back and take as many; for the compute thread."""
    pool.free(holding.session)
    pool.reserve(holding.session, holding.sequences, holding.max_length)
    return pool.free_tokens
