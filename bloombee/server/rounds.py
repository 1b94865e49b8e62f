"""Rounds of admission: the queue on the event loop, the pages on the compute thread.

A round takes the queue as it stands to the compute thread, reserves there what the
free pages allow, and is settled on the loop in one go. One runs at a time; the next
comes when something has changed meanwhile. A request whose caller has gone by the
time it was served is given back at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bloombee.core import PeerId
from bloombee.errors import BloomBeeError, KVFull, StepFailed
from bloombee.kv.interface import KVPool
from bloombee.server.executor import Executor
from bloombee.server.fair_queue import FairQueue, Line, Request, Round
from bloombee.server.parking import Holding


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue, and what `holding` it is for.

    `granted` gets the tokens that are free after it; `tried` is set whenever a round
    has ended in which it was considered. `refusal`: what the pool then had against it.
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


class Rounds:
    """Serves requests for KV. `grant` is called for each that is served, on the loop.

    `held_pages` is what each peer holds already, as it changes; one may hold
    `peer_pages` in all (None: no limit).
    """

    def __init__(
        self,
        executor: Executor,
        peer_pages: int | None,
        held_pages: Mapping[PeerId, int],
        grant: Callable[[Waiter], None],
    ) -> None:
        self._executor = executor
        self._queue = FairQueue(peer_pages)
        self._held_pages = held_pages
        self._grant = grant
        self._waiters: dict[Request, Waiter] = {}
        self._round: asyncio.Future[_Reserved] | None = None
        self._again = False
        self.free_tokens = 0

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def running(self) -> bool:
        """Whether a round is on its way, so that `free_tokens` is about to change."""
        return self._round is not None

    def line(self) -> Line:
        """The queue as it stands."""
        return self._queue.line(self._held_pages)

    def enter(self, request: Request, holding: Holding) -> Waiter:
        """Let a request wait, and try it at once."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiter = self._waiters[request] = Waiter(request, holding, future, asyncio.Event())
        self._queue.enter(request)
        self.changed()
        return waiter

    def withdraw(self, waiter: Waiter) -> bool:
        """It waits no longer; False when it had been granted or failed before."""
        self._waiters.pop(waiter.request, None)
        if waiter.request not in self._queue:
            return False
        self._queue.withdraw(waiter.request)
        self.changed()
        return True

    def fail(self, waiter: Waiter, error: BloomBeeError) -> None:
        """Answer a request that waits with `error`."""
        self.withdraw(waiter)
        if not waiter.granted.done():
            waiter.granted.set_exception(error)
        waiter.tried.set()

    def of(self, holding: Holding) -> list[Waiter]:
        """The requests that wait for `holding`."""
        return [waiter for waiter in self._waiters.values() if waiter.holding is holding]

    def changed(self) -> None:
        """Start a round, now or after the one that runs, if anyone waits."""
        if self._round is not None:
            self._again = True
        elif self._queue:
            line = self.line()
            holdings = {request: self._waiters[request].holding for request in line.order}
            self._again = False
            self._round = self._executor.ask(partial(_reserve, line, holdings))
            self._round.add_done_callback(partial(self._end, line))

    def _end(self, line: Line, done: asyncio.Future[_Reserved]) -> None:
        self._round = None
        waiters = [self._waiters[request] for request in line.order if request in self._queue]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            for waiter in waiters:
                self.fail(waiter, _typed(error))
        elif not done.cancelled():
            for waiter in waiters:
                waiter.refusal = None
            self._settle(done.result())
            for waiter in waiters:
                waiter.tried.set()
        if self._again:
            self.changed()

    def _settle(self, reserved: _Reserved) -> None:
        self.free_tokens = reserved.free_tokens
        for request in reserved.round.served:
            error = reserved.refused.get(request)
            if request not in self._queue:
                if error is None:  # its caller has gone meanwhile
                    self._executor.free(request.session)
                    self._again = True
                continue
            waiter = self._waiters[request]
            if isinstance(error, KVFull):  # no room of another kind; it keeps its place
                waiter.refusal = error
            elif error is not None:
                self.fail(waiter, error)
            else:
                del self._waiters[request]
                self._queue.serve(request)
                self._grant(waiter)
                waiter.granted.set_result(self.free_tokens)
        self._queue.count_passes(reserved.round.passed)


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
    return error if isinstance(error, BloomBeeError) else StepFailed(str(error))
