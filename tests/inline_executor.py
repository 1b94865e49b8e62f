"""An executor without a thread: it computes on the event loop, in virtual time.

Everything else is the real one's: its queue, its scheduler, its passes. A pass
takes as long as `compute_s` says of its tokens; what arrives meanwhile waits, as it
would for the thread. Swarms of these are repeatable and cost no real waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch

from bloombee.errors import PeerStopping
from bloombee.server.executor import STOPPING, Executor, ExecutorSettings
from bloombee.server.forward import typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bloombee.kv.interface import KVPool
    from bloombee.server.work import Model


class _Intake:
    """Stands in for the queue to the thread; tells whom it was made for of each job."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._jobs: deque[Any] = deque()
        self._wake = wake

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Any) -> None:
        self._jobs.append(job)
        self._wake()

    def get(self) -> Any:
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._jobs:
            raise Empty
        return self._jobs.popleft()


class InlineExecutor(Executor):
    """`compute_s` gives the virtual seconds that a pass over so many tokens takes."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        settings: ExecutorSettings,
        compute_s: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        super().__init__(model, pool, settings)
        self._intake: Any = _Intake(self._wake)
        self._compute_s = compute_s
        self._busy = False
        self._ended = asyncio.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def stop(self, deadline_s: float) -> None:
        """Fail what waits with PeerStopping, as the real one does."""
        if self._closed:
            return
        self._closed = True
        self._stopping = True
        self._wake()
        try:
            async with asyncio.timeout(max(deadline_s, 1.0)):
                await self._ended.wait()
        except TimeoutError:
            self._end()

    def crash(self) -> None:
        """Compute and answer nothing any more, as a killed process."""
        self._closed = self._stopping = self._busy = True
        self._deliveries.clear()
        self._ended.set()

    def _wake(self) -> None:
        if not self._busy and self._loop is not None:
            self._busy = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Take everything in and run one pass; its results come after its time."""
        if self._ended.is_set():
            return
        while len(self._intake):
            self._accept(self._intake.get_nowait())
        tokens = sum(waiting.item.tokens for waiting in self._waiting)
        if not self._stopping:
            with torch.inference_mode():
                self._guarded_pass()
        left = sum(waiting.item.tokens for waiting in self._waiting)
        assert self._loop is not None
        spent_s = self._compute_s(tokens - left) if tokens else 0.0
        if spent_s > 0:
            self._loop.call_later(spent_s, self._rest)
        else:
            self._rest()

    def _guarded_pass(self) -> None:
        try:
            self._pass()
        except Exception as error:  # noqa: BLE001 - as the real thread treats its bugs
            self._fail(self._waiting, typed(error))

    def _rest(self) -> None:
        """The pass is over: answer, then go on if there is more."""
        if self._ended.is_set():
            return
        if self._stopping:
            self._end()
            return
        self._deliver()
        self._busy = False
        if self._waiting or len(self._intake):
            self._wake()

    def _end(self) -> None:
        while len(self._intake):
            self._accept(self._intake.get_nowait())
        self._fail(self._waiting, PeerStopping(STOPPING))
        self._deliver()
        self._ended.set()

    def _deliver(self) -> None:
        deliveries, self._deliveries = self._deliveries, []
        for delivery in deliveries:
            delivery()
