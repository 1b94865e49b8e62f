"""The compute thread: it alone touches the device, the model and the KV pool.

The event loop hands over work through a `SimpleQueue`; results go back with one
`call_soon_threadsafe` a pass (15-20 us for the round trip). Short calls on the
pool run before waiting steps; which steps run next is the scheduler's choice.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, PeerStopping, RequestError
from bloombee.kv.interface import KVPool
from bloombee.server.exposure import Exposure
from bloombee.server.forward import Failure, Run, run_pass, typed
from bloombee.server.recent_load import RecentLoad
from bloombee.server.scheduler import Budget, Scheduler, Share
from bloombee.server.work import Model, Outcome, StepWork, Waiting
from bloombee.telemetry import now_us

logger = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
"""Pure Python on the compute thread then delays the event loop by 0.7 ms, not 5."""

STOPPING = "the server is shutting down"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """`threads` torch computes with; `pass_tokens` of one forward pass at most.

    While others decode a pass takes at most `chunk_tokens` of prompts. `whole_prompts`
    are not cut to either: some models rotate by the length of the call.
    """

    threads: int = 1
    pass_tokens: int = 512
    chunk_tokens: int = 128
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[KVPool], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Free:
    session: SessionId
    future: asyncio.Future[None]


class _Stop:
    pass


_Job = StepWork | _Call | _Free | _Stop
_Delivery = Callable[[], object]


class Executor:
    """Runs steps and pool calls of all sessions on one thread."""

    def __init__(self, model: Model, pool: KVPool, settings: ExecutorSettings) -> None:
        self._model = model
        self._pool = pool
        self._settings = settings
        self._scheduler = Scheduler(Budget.of(settings.pass_tokens, settings.chunk_tokens))
        self._intake: SimpleQueue[_Job] = SimpleQueue()
        self._waiting: list[Waiting] = []
        self._deliveries: list[_Delivery] = []
        self._arrivals = 0
        self._closed = False
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load = RecentLoad(now_us())
        self._room = pool.free_tokens
        self._exposure = Exposure()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    # On the event loop ---------------------------------------------------------

    def start(self) -> None:
        """Start the thread; results go to the running loop."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    async def stop(self, deadline_s: float) -> None:
        """Fail what waits with PeerStopping; the pass that runs is given `deadline_s`."""
        self._closed = True
        self._intake.put(_Stop())
        await asyncio.to_thread(self._thread.join, deadline_s)

    def submit(self, work: StepWork) -> None:
        """Queue a step; its `done` is called on the loop with what came of it."""
        if self._closed:
            work.done(Outcome(None, PeerStopping(STOPPING)))
        else:
            self._intake.put(work)

    def ask(self, function: Callable[[KVPool], T]) -> asyncio.Future[T]:
        """Have `function` run on the compute thread before waiting steps.

        The future gets what it returns or raises, PeerStopping once the executor has
        stopped. `function` runs even when the future is cancelled.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(PeerStopping(STOPPING))
        else:
            self._intake.put(_Call(function, future))
        return future

    async def call(self, function: Callable[[KVPool], T]) -> T:
        """What `function` returns or raises, run as by `ask`."""
        return await self.ask(function)

    def set_decode_rows(self, rows: int | None) -> None:
        """At most so many sequences decode in one pass (None: no limit), from the next on.

        Any thread may call it.
        """
        self._scheduler.set_decode_rows(rows)

    async def free_tokens(self) -> int:
        """Tokens that no session has reserved."""
        return await self.call(lambda pool: pool.free_tokens)

    def room_and_load(self) -> tuple[int, float]:
        """Free tokens as of the last pass, and the share of the last seconds spent in passes.

        Waits for nothing: a question would wait for the pass that runs, a second or more.
        Raises PeerStopping once it has stopped.
        """
        if self._closed:
            raise PeerStopping(STOPPING)
        return self._room, self._load.share(now_us())

    def free(self, session: SessionId) -> asyncio.Future[None]:
        """Give a session's KV back, now; the future is done when it is.

        Its steps that wait fail with RequestError.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_result(None)
        else:
            self._intake.put(_Free(session, future))
        return future

    # On the compute thread -------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._settings.threads)
        with torch.inference_mode():
            while not self._stopping:
                try:
                    self._take_in()
                    self._deliver()  # who asked the pool need not wait for the pass
                    if not self._stopping:
                        self._pass()
                except Exception as error:
                    logger.exception("the compute thread met a bug")
                    self._fail(self._waiting, typed(error))
                self._deliver()
        self._fail(self._waiting, PeerStopping(STOPPING))
        self._deliver()

    def _take_in(self) -> None:
        """Accept everything that came; wait for something when nothing waits."""
        self._accept(self._intake.get() if not self._waiting else None)
        while True:
            try:
                self._accept(self._intake.get_nowait())
            except Empty:
                return

    def _accept(self, job: _Job | None) -> None:
        match job:
            case StepWork():
                divisible = not self._settings.whole_prompts
                waiting = Waiting.of(job, self._arrivals, now_us(), divisible=divisible)
                self._arrivals += 1
                self._waiting.append(waiting)
            case _Call():
                self._answer(job.function, job.future)
            case _Free():
                dropped = [w for w in self._waiting if w.work.session == job.session]
                self._fail(dropped, RequestError("the session was closed"))
                self._answer(lambda pool: pool.free(job.session), job.future)
            case _Stop():
                self._stopping = True
            case None:
                pass

    def _answer(self, function: Callable[[KVPool], T], future: asyncio.Future[T]) -> None:
        """Call `function` and have the loop set what it returns or raises."""
        try:
            result = function(self._pool)
            self._room = self._pool.free_tokens
        except Exception as raised:
            if not isinstance(raised, BloomBeeError):
                logger.exception("a call on the KV pool failed")
            error = typed(raised)
            self._deliveries.append(lambda: future.done() or future.set_exception(error))
        else:
            self._deliveries.append(lambda: future.done() or future.set_result(result))

    def _pass(self) -> None:
        """Run what the scheduler picks."""
        shares = self._scheduler.next_batch([waiting.item for waiting in self._waiting])
        if not shares:
            return
        runs = self._runs(shares)
        started_us = now_us()
        for run in runs:
            if run.waiting.computed == 0:
                work = run.waiting.work
                run.waiting.queue_us = started_us - run.waiting.arrived_us
                run.waiting.exposed_us = self._exposure.of(work.arrived_us, work.wire_us)
        failures = self._compute(runs)
        spent_us = now_us() - started_us
        self._load.note(started_us, spent_us)
        self._exposure.computed(started_us, started_us + spent_us)
        for run in runs:
            run.waiting.compute_us += spent_us
        self._settle(runs, failures)

    def _compute(self, runs: Sequence[Run]) -> list[Failure]:
        """One forward pass; returns the steps that failed in it."""
        return run_pass(self._model, self._pool, runs)

    def _runs(self, shares: Sequence[Share]) -> list[Run]:
        by_arrival = {waiting.item.arrival: waiting for waiting in self._waiting}
        return [Run(by_arrival[share.item.arrival], share.tokens) for share in shares]

    def _settle(self, runs: Sequence[Run], failures: Sequence[Failure]) -> None:
        """Take finished and failed steps out of the queue and answer them."""
        self._room = self._pool.free_tokens
        for failure in failures:
            self._fail([failure.waiting], failure.error)
        failed = {id(failure.waiting) for failure in failures}
        for run in runs:
            if id(run.waiting) in failed:
                continue
            left = run.waiting.item.tokens - run.tokens
            if left:
                run.waiting.item = replace(run.waiting.item, tokens=left)
            else:
                self._waiting.remove(run.waiting)
                self._finish(run.waiting)

    def _finish(self, waiting: Waiting) -> None:
        outcome = Outcome(
            waiting.result(),
            queue_us=waiting.queue_us,
            compute_us=max(0, waiting.compute_us - waiting.copy_us),
            chosen=waiting.chosen,
            copy_us=waiting.copy_us,
            exposed_us=waiting.exposed_us,
        )
        self._deliveries.append(lambda: waiting.work.done(outcome))

    def _fail(self, waiting: Sequence[Waiting], error: BloomBeeError) -> None:
        gone = {id(one) for one in waiting}
        for one in list(waiting):
            self._deliveries.append(lambda one=one: one.work.done(Outcome(None, error)))
        self._waiting = [one for one in self._waiting if id(one) not in gone]

    def _deliver(self) -> None:
        deliveries, self._deliveries = self._deliveries, []
        if not deliveries or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_call_all, deliveries)
        except RuntimeError:
            logger.debug("results of %d jobs came after the loop had closed", len(deliveries))


def _call_all(deliveries: Sequence[_Delivery]) -> None:
    """Call each; one that raises is the loop's to report, and keeps no other from its answer."""
    remaining = iter(deliveries)
    try:
        for delivery in remaining:
            delivery()
    finally:
        if others := tuple(remaining):
            asyncio.get_running_loop().call_soon(_call_all, others)
