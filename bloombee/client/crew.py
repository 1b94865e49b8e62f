"""Prompts in flight: as many as there is room for, one replaced as soon as it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bloombee.client.completions import Completion, complete, failure
from bloombee.client.decoding import Decodes
from bloombee.client.prompts import Job, Words
from bloombee.core import doubled
from bloombee.errors import BloomBeeError, DeadlineExceeded, KVFull

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 4.0


class Places:
    """How many prompts may be in flight: as many as servers have KV for, `most` at the most.

    A prompt that finds no room goes back and takes its place with it. Places come
    back one by one, each when as many prompts as there are places have ended well.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self.taken = 0
        self.given_back = 0
        """How often a place was, ever."""
        self._ended = 0

    @property
    def is_free(self) -> bool:
        """Whether one more may start."""
        return self.taken < self.limit

    def ended(self) -> None:
        """A prompt that took a place is answered, or failed by itself."""
        self.taken -= 1
        self.given_back += 1
        self._ended += 1
        if self._ended >= self.limit < self.most:
            self._ended = 0
            self.limit += 1

    def found_no_room(self, given_back: int) -> bool:
        """A prompt that took a place got no KV; returns whether to try again later.

        Not when it was alone all the time, since when `given_back` was what it said:
        nothing of ours will make room for it.
        """
        alone = self.taken == 1 and self.given_back == given_back
        self.taken -= 1
        self.given_back += 1
        self._ended = 0
        self.limit = max(1, self.taken)
        return not alone


@dataclass(frozen=True, slots=True)
class Terms:
    """How a crew works: at most `concurrency` prompts at a time, each for `deadline_s`.

    A prompt that fails of the swarm (a server that no other replaces) is tried again for
    `patience_s` from its first failure.
    """

    concurrency: int
    patience_s: float
    deadline_s: float | None = None
    on_token: Callable[[], None] = lambda: None


class Crew:
    """Answers jobs, each by itself. Everything here runs in one event loop.

    A job ends with its answer or with its own error, and touches no other. Servers let others
    go first: nobody waits for the tokens of one job.
    """

    def __init__(
        self, source: Decodes, words: Words, terms: Terms, tasks: asyncio.TaskGroup
    ) -> None:
        self._source = source
        self._words = words
        self._terms = terms
        self._tasks = tasks
        self._places = Places(terms.concurrency)
        self._waiting: deque[Job] = deque()
        self._working: set[asyncio.Task[None]] = set()
        self._ended: deque[Completion] = deque()
        self._bug: BaseException | None = None
        self._news = asyncio.Event()

    async def add(self, jobs: Sequence[Job]) -> None:
        """Take more jobs."""
        self._waiting.extend(jobs)
        self._fill()

    async def wait(self) -> list[Completion]:
        """Wait until at least one job has ended, and give those that have."""
        while not self._ended and self._bug is None:
            self._news.clear()
            await self._news.wait()
        if self._bug is not None:
            raise self._bug
        return self.ended()

    def ended(self) -> list[Completion]:
        """Those that have ended and were not given yet."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    async def put_back(self, ended: Sequence[Completion]) -> None:
        """What `wait` gave has not reached anybody."""
        self._ended.extendleft(reversed(ended))

    async def close(self) -> None:
        """Start nothing more, end what is in flight, and wait until servers are told."""
        self._waiting.clear()
        working = list(self._working)
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working)

    def _fill(self) -> None:
        while self._waiting and self._places.is_free:
            self._places.taken += 1
            task = self._tasks.create_task(self._work(self._waiting.popleft()))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _work(self, job: Job) -> None:
        given_back = self._places.given_back
        try:
            ended = await self._complete(job)
        except KVFull as error:
            if self._places.found_no_room(given_back):
                _log.info("prompt %d waits for room: %s", job.index, error)
                self._waiting.appendleft(job)
                self._fill()
                return
            ended = failure(job.index, job.request, error)
        except BloomBeeError as error:
            self._places.ended()
            ended = failure(job.index, job.request, error)
        except Exception as error:  # noqa: BLE001 - a bug, raised again where the results are read
            self._bug = error
            self._news.set()
            return
        else:
            self._places.ended()
        self._ended.append(ended)
        self._news.set()
        self._fill()

    async def _complete(self, job: Job) -> Completion:
        """The answer, tried for again while the swarm may come back."""
        terms, now_s = self._terms, asyncio.get_running_loop().time
        until_s: float | None = None
        failures = 0
        while True:
            try:
                return await complete(
                    self._source,
                    job,
                    self._words,
                    terms.deadline_s,
                    terms.on_token,
                    background=True,
                )
            except (KVFull, DeadlineExceeded):
                raise
            except BloomBeeError as error:
                until_s = now_s() + terms.patience_s if until_s is None else until_s
                if not error.retry or now_s() >= until_s:
                    raise
                _log.info("prompt %d is tried again: %s", job.index, error)
            await asyncio.sleep(doubled(FIRST_PAUSE_S, failures, LONGEST_PAUSE_S))
            failures += 1
