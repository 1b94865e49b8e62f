"""Who may hold KV, and who waits for it.

Every session reserves here and is freed here. A request enters the `fair_queue`; a
round on the compute thread serves as many as the pages that are free allow, and the
next round comes when something has changed: pages were freed, a request came or
went. What a request gets is settled on the event loop in one go, so a caller that
is cancelled or times out leaves nothing behind. While requests wait, the longest
idle sessions are parked for them (`parking`), piece by piece, by those who wait.

A step runs within `use`, which brings a parked session back first. Time is the
event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from bloombee.core import PeerId, SessionId
from bloombee.errors import BloomBeeError, KVFull, RequestError
from bloombee.kv.interface import KVPool
from bloombee.server.executor import Executor
from bloombee.server.fair_queue import MOST_PASSES, FairQueue, Line, Request, Round
from bloombee.server.parking import Holding, Parking
from bloombee.server.validation import Limits
from bloombee.server.work import Outcome, StepWork

LEAST_PAUSE_S = 0.05
"""Between two looks of a waiting request at whether someone could be parked."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue.

    `granted` gets the tokens that are free after it; `tried` is done whenever a round
    has ended in which it was considered. `refusal`: what the pool had against it.
    """

    request: Request
    holding: Holding
    granted: asyncio.Future[int]
    tried: asyncio.Event
    refusal: KVFull | None = None


@dataclass(frozen=True, slots=True)
class _Reserved:
    """What a round came to; `refused` says why the pool took back some of it."""

    round: Round
    refused: Mapping[Request, BloomBeeError]
    free_tokens: int


class Admission:
    """Reserves and frees the KV of sessions, fairly. Lives on the event loop."""

    def __init__(self, executor: Executor, pool: KVPool, limits: Limits) -> None:
        """`pool` is only asked for its sizes; the compute thread does the rest."""
        self._executor = executor
        self._limits = limits
        self._page_tokens = pool.page_tokens
        self._total_tokens = pool.total_tokens
        share = limits.max_tokens_per_peer
        self._queue = FairQueue(None if share is None else share // pool.page_tokens)
        self._parking = Parking(executor, pool.shape, limits.park_bytes, self._changed)
        self._holdings: dict[SessionId, Holding] = {}
        self._held_pages: Counter[PeerId] = Counter()
        self._waiters: dict[Request, _Waiter] = {}
        self._free_tokens = pool.total_tokens
        self._round: asyncio.Future[_Reserved] | None = None
        self._again = False

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

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

    def free(self, session: SessionId) -> asyncio.Future[None]:
        """Give all of a session's KV back, parked or not; the future is done when it is.

        Its steps that wait fail with RequestError.
        """
        holding = self._holdings.pop(session, None)
        if holding is not None:
            holding.closed = True
            self._count(holding.peer, -holding.pages)
            self._parking.drop(holding)
        for waiter in [one for one in self._waiters.values() if one.holding is holding]:
            self._fail(waiter, RequestError("the session was closed"))
        freed = self._executor.free(session)
        freed.add_done_callback(lambda _: self._changed())
        return freed

    @asynccontextmanager
    async def use(self, session: SessionId, wait_s: float) -> AsyncIterator[Use]:
        """Keep a session's KV in the pool for a step, until the step that it submits is done.

        A parked session waits to come back, as in `reserve`. Raises KVFull (it stays
        parked then), RequestError when it isn't open, PeerStopping.
        """
        holding = self._holdings.get(session)
        if holding is None:
            raise RequestError("the session holds no KV here; open it first")
        holding.uses += 1
        holding.begun += 1
        holding.size_bytes = 0  # it may change now
        use = Use(self, holding)
        try:
            if holding.saved is not None:
                async with holding.returning:
                    await self._bring_back(holding, wait_s)
            yield use
        finally:
            if not use.submitted:
                self.end_use(holding)

    def submit(self, holding: Holding, work: StepWork) -> None:
        """Hand a step to the compute thread; its use ends when it is done."""
        holding.span = work.span

        def done(outcome: Outcome) -> None:
            if outcome.error is None and work.operations is not None:
                self._release(holding, work.operations.releases)
            self.end_use(holding)
            work.done(outcome)

        self._executor.submit(replace(work, done=done))

    def end_use(self, holding: Holding) -> None:
        """A step is over; when none is left the session idles."""
        holding.uses -= 1
        holding.idle_since_s = asyncio.get_running_loop().time()

    def _release(self, holding: Holding, sequences: tuple[int, ...]) -> None:
        fresh = set(sequences) - holding.released
        if fresh and not holding.closed:
            holding.released |= fresh
            self._count(holding.peer, -len(fresh) * holding.pages_each)
            self._changed()

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

    async def _bring_back(self, holding: Holding, wait_s: float) -> None:
        if holding.saved is None:
            return
        request = Request(holding.peer, holding.session, holding.pages, returning=True)
        await self._queued(request, holding, wait_s)
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
        waiter = _Waiter(request, holding, loop.create_future(), asyncio.Event())
        self._waiters[request] = waiter
        self._queue.enter(request)
        self._changed()
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

    async def _granted(self, waiter: _Waiter, *, once: bool) -> int:
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

    def _withdraw(self, waiter: _Waiter) -> None:
        """The caller went or gave up: undo what it asked for."""
        self._waiters.pop(waiter.request, None)
        if waiter.request in self._queue:
            self._queue.withdraw(waiter.request)
            self._changed()
        elif waiter.granted.done() and waiter.granted.exception() is None:
            if waiter.request.returning:
                self._give_back(waiter.holding)
            elif not waiter.holding.closed:
                self.free(waiter.request.session)
        if not self._queue:
            self._parking.abandon()

    def _give_back(self, holding: Holding) -> None:
        """Free the pool's pages of a session that stays parked, or was not let in after all."""
        if not holding.closed:
            freed = self._executor.free(holding.session)
            freed.add_done_callback(lambda _: self._changed())

    def _fail(self, waiter: _Waiter, error: BloomBeeError) -> None:
        if waiter.request in self._queue:
            self._queue.withdraw(waiter.request)
        if not waiter.granted.done():
            waiter.granted.set_exception(error)
        waiter.tried.set()

    def _full(self, waiter: _Waiter, waited_s: float) -> KVFull:
        request, held = waiter.request, waiter.holding
        line = self._queue.line(self._held_pages)
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
            f"{self._free_tokens} tokens free, {asked} ({live} sequences of "
            f"{held.max_length}){behind}, {waited}; ask another server, or later"
        )

    # Rounds --------------------------------------------------------------------

    def _changed(self) -> None:
        """Start a round, now or after the one that runs, if anyone waits."""
        if self._round is not None:
            self._again = True
        elif self._queue:
            line = self._queue.line(self._held_pages)
            holdings = {request: self._waiters[request].holding for request in line.order}
            self._again = False
            self._round = self._executor.ask(partial(_reserve, line, holdings))
            self._round.add_done_callback(partial(self._end_round, line))

    def _end_round(self, line: Line, done: asyncio.Future[_Reserved]) -> None:
        self._round = None
        waiters = [self._waiters[request] for request in line.order if request in self._queue]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            for waiter in waiters:
                self._fail(waiter, _typed(error))
        elif not done.cancelled():
            self._settle(done.result())
            for waiter in waiters:
                waiter.tried.set()
        if self._again:
            self._changed()

    def _settle(self, reserved: _Reserved) -> None:
        self._free_tokens = reserved.free_tokens
        for request in reserved.round.served:
            error = reserved.refused.get(request)
            waiter = self._waiters.get(request)
            if waiter is None or request not in self._queue:
                if error is None:  # its caller has gone meanwhile
                    self._executor.free(request.session)
                    self._again = True
            elif isinstance(error, KVFull):  # no room of another kind; it keeps its place
                waiter.refusal = error
            elif error is not None:
                self._fail(waiter, error)
            else:
                self._grant(waiter)
        self._queue.count_passes(reserved.round.passed)

    def _grant(self, waiter: _Waiter) -> None:
        self._queue.serve(waiter.request)
        del self._waiters[waiter.request]
        waiter.holding.idle_since_s = asyncio.get_running_loop().time()
        if not waiter.request.returning:
            self._holdings[waiter.request.session] = waiter.holding
            self._count(waiter.request.peer, waiter.request.pages)
        waiter.granted.set_result(self._free_tokens)

    # Parking -------------------------------------------------------------------

    def _victim(self) -> Holding | None:
        """The session to park now: the longest idle one, if that lets somebody in."""
        if self._parking.busy or self._round is not None:
            return None
        idle = self._limits.park_idle_s
        longest = asyncio.get_running_loop().time() - idle
        able = [
            one
            for one in self._holdings.values()
            if not one.uses and one.idle_since_s <= longest and self._parking.fits(one)
        ]
        able.sort(key=lambda one: one.idle_since_s)
        reach = self._free_tokens // self._page_tokens + sum(one.pages for one in able)
        return self._parking.prefers(able) if able and self._helps(reach) else None

    def _helps(self, reach_pages: int) -> bool:
        """Whether someone who waits could be served with so many pages."""
        line = self._queue.line(self._held_pages)
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


class Use:
    """A session's KV is in the pool; at most one step is submitted under it."""

    def __init__(self, admission: Admission, holding: Holding) -> None:
        self._admission = admission
        self._holding = holding
        self.submitted = False

    def submit(self, work: StepWork) -> None:
        """Hand a step to the compute thread."""
        self.submitted = True
        self._admission.submit(self._holding, work)


def _reserve(line: Line, holdings: Mapping[Request, Holding], pool: KVPool) -> _Reserved:
    """Serve what the free pages allow; for the compute thread."""
    served = line.serve(pool.free_tokens // pool.page_tokens)
    refused: dict[Request, BloomBeeError] = {}
    for request in served.served:
        held = holdings[request]
        try:
            pool.reserve(held.session, held.sequences, held.max_length, frozenset(held.released))
        except BloomBeeError as error:
            refused[request] = error
    return _Reserved(served, refused, pool.free_tokens)


def _typed(error: BaseException) -> BloomBeeError:
    return error if isinstance(error, BloomBeeError) else RequestError(str(error))
