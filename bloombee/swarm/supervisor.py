"""Keeps a libp2p daemon and the DHT node on it running.

A life is one daemon with its DHT node. When the daemon ends, or stops answering on its
control socket, the next life takes the place of the last: same key, same listening
port, same sockets, same id in the DHT, and the values stored there. Calls that met the
end of a life are made again on the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from bloombee.errors import BloomBeeError, SwarmError
from bloombee.swarm.daemon import Daemon
from bloombee.swarm.dht import Dht
from bloombee.swarm.restarts import RestartLimits, Restarts
from bloombee.transport.p2p_control import FAILURES, DaemonControl

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from bloombee.swarm.daemon import DaemonOptions
    from bloombee.swarm.runtime_folder import RuntimeFolder

Result = TypeVar("Result")

_BEGIN_S = 20.0
"""For a daemon and its DHT node to start."""
_NEWS_S = 0.3
"""How much later than from a failing call we may learn that the daemon has ended."""
_UNANSWERED = 2
"""Probes in a row that a daemon may miss before it counts as hung."""
_RENEW_EVERY_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Life:
    """A daemon and the DHT node on it."""

    daemon: Daemon
    dht: Dht

    @classmethod
    async def begin(
        cls, options: DaemonOptions, folder: RuntimeFolder, last: Life | None, *, client_mode: bool
    ) -> Self:
        """Start both, in the place of `last` if there was one.

        Raises what Daemon.start raises, or what FAILURES lists.
        """
        daemon = await Daemon.start(options, folder)
        try:
            dht = await Dht.start(daemon, client_mode=client_mode, last=last and last.dht)
        except BaseException:
            daemon.kill()
            raise
        return cls(daemon, dht)

    async def has_ended(self) -> bool:
        """Whether it is over, also when a call noticed that first."""
        try:
            async with asyncio.timeout(_NEWS_S):
                await self.daemon.ended()
        except TimeoutError:
            return False
        return True

    async def answers(self, deadline_s: float) -> bool:
        """Whether the daemon does."""
        try:
            async with asyncio.timeout(deadline_s):
                await DaemonControl(self.daemon.control).identify()
        except FAILURES as error:
            _log.debug("the libp2p daemon did not answer: %r", error)
            return False
        return True


class Supervisor:
    """Runs in the DHT's event loop. `begin` starts a life, in the place of the one given."""

    def __init__(
        self,
        first: Life,
        begin: Callable[[Life], Awaitable[Life]],
        probe_s: float,
        limits: RestartLimits | None = None,
    ) -> None:
        self._life = first
        self._begin = begin
        self._probe_s = probe_s
        self._limits = limits or RestartLimits()
        self._changed = asyncio.Event()
        self._calls: set[asyncio.Timeout] = set()
        self._error: SwarmError | None = None
        self._renewed_s = -_RENEW_EVERY_S
        self._renewing = ""

    @property
    def life(self) -> Life:
        """The present life, or the last."""
        return self._life

    def kill(self) -> None:
        """End the daemon that runs, at once."""
        self._life.daemon.kill()

    def renew(self, why: str) -> None:
        """End the present life for a new one, unless that was done a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._renewed_s >= _RENEW_EVERY_S:
            self._renewed_s, self._renewing = now_s, why
            self._life.daemon.kill()

    async def do(self, work: Callable[[Dht], Awaitable[Result]]) -> Result:
        """What `work` makes of a DHT node whose daemon lived throughout.

        Waits for the next life where it must: the deadline is the caller's. Raises what
        `work` raises, and SwarmError when there are no more lives.
        """
        while True:
            life = await self._living()
            try:
                async with self._interruptible():
                    result = await work(life.dht)
            except (SwarmError, *FAILURES):
                if not await life.has_ended():
                    raise
            else:
                # What an ending daemon left unanswered looks like an empty swarm.
                if not life.daemon.has_ended:
                    return result

    @contextlib.asynccontextmanager
    async def _interruptible(self) -> AsyncGenerator[None, None]:
        """Raise TimeoutError when the life ends, of whose daemon hivemind awaits answers."""
        async with asyncio.timeout(None) as call:
            self._calls.add(call)
            try:
                yield
            finally:
                self._calls.discard(call)

    def _interrupt_calls(self) -> None:
        for call in self._calls:
            call.reschedule(asyncio.get_running_loop().time())

    async def _living(self) -> Life:
        while self._error is None and self._life.daemon.has_ended:
            await self._changed.wait()
        if self._error is not None:
            raise SwarmError(str(self._error))
        return self._life

    async def keep(self, lost: Callable[[], None], restarted: Callable[[], None]) -> SwarmError:
        """Replace each life that ends; returns why there are no more.

        Calls `lost` when one has ended unasked, `restarted` when the next has begun.
        """
        clock = asyncio.get_running_loop().time
        restarts = Restarts(self._limits)
        while True:
            began_s = clock()
            told = await self._end_of(self._life)
            self._interrupt_calls()
            if self._renewing:
                _log.info("starting the libp2p daemon again: %s", self._renewing)
                self._renewing = ""
            else:
                _log.warning("%s; starting it again", told)
                lost()
                restarts.died(clock() - began_s)
            life = await self._next(self._life, restarts)
            if life is None:
                return SwarmError(
                    f"{told}, and could not be started again; "
                    "this process is no longer in the swarm, restart it"
                )
            self._life = life
            self._announce()
            restarted()

    def give_up(self, error: SwarmError) -> None:
        """There will be no more lives: every call that waits for one, or will, raises `error`."""
        self._error = error
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _end_of(self, life: Life) -> str:
        """Wait until it has ended, or kill it when it hangs; says what happened."""
        missed = 0
        while missed < _UNANSWERED:
            try:
                async with asyncio.timeout(self._probe_s):
                    await life.daemon.ended()
            except TimeoutError:
                missed = 0 if await life.answers(self._probe_s) else missed + 1
            else:
                return f"the libp2p daemon (pid {life.daemon.pid}) ended: {life.daemon.last_words}"
        life.daemon.kill()
        return f"the libp2p daemon (pid {life.daemon.pid}) no longer answered, and was killed"

    async def _next(self, last: Life, restarts: Restarts) -> Life | None:
        await last.daemon.ended()
        last.daemon.kill()  # lets go of what was its
        await last.dht.abandon()
        while (delay_s := restarts.delay_s) is not None:
            await asyncio.sleep(delay_s)
            try:
                async with asyncio.timeout(_BEGIN_S):
                    return await self._begin(last)
            except (BloomBeeError, *FAILURES) as error:
                restarts.failed()
                _log.info("the libp2p daemon could not be started again yet: %r", error)
        return None
