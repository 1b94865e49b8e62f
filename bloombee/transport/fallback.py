"""Two ways to a peer: the direct one first, and another when that fails."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from bloombee.errors import Refused, TransportError

if TYPE_CHECKING:
    from bloombee.transport.interface import Dialer, Endpoint, Listener, Stream, StreamHandler

_log = logging.getLogger(__name__)

K = TypeVar("K")

_REMEMBERED = 4096
"""Endpoints and peers of which something is known: swarms are smaller."""


class FallbackListener:
    """`Listener` over two, known by the address of `first`."""

    def __init__(self, first: Listener, second: Listener) -> None:
        self._first = first
        self._second = second

    @property
    def address(self) -> str:
        """`host:port` of the direct way."""
        return self._first.address

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept on both ways; raises what the one that fails raises."""
        await self._first.start(handler)
        await self._second.start(handler)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to `grace_s` for handlers, then cancel them."""
        async with asyncio.TaskGroup() as stopping:
            stopping.create_task(self._first.stop(grace_s))
            stopping.create_task(self._second.stop(grace_s))


class FallbackDialer:
    """`Dialer` over two: `first` gets `first_s` of a deadline, at most half; `second` the rest.

    An endpoint that `second` reached after `first` had failed is dialed by `second` at
    once for `retry_first_s`: a peer behind NAT would otherwise cost `first_s` each time.
    One without an address always is. A wrong certificate (AuthError) is no reason to
    look for another way; nor is an endpoint that `first` had reached and that refuses
    now: its process has ended, and looking for it elsewhere would only take time.
    """

    def __init__(
        self, first: Dialer, second: Dialer, *, first_s: float = 3.0, retry_first_s: float = 60.0
    ) -> None:
        self._first = first
        self._second = second
        self._first_s = first_s
        self._retry_first_s = retry_first_s
        self._failed_at_s: dict[Endpoint, float] = {}
        self._reached: dict[Endpoint, None] = {}
        self._away: dict[str, None] = {}
        """Peers of which it was said that no direct way leads to them: once is enough."""

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        """A new stream by either way; raises what `second` raises, naming both failures.

        Raises Refused when `first` says so of an endpoint that it had reached.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        failure = self._known_failure(endpoint, started_s)
        if not failure:
            try:
                return await self._dial_first(endpoint, min(deadline_s / 2, self._first_s))
            except TransportError as error:
                if isinstance(error, Refused) and endpoint in self._reached:
                    del self._reached[endpoint]
                    raise
                failure = str(error)
            self._failed_at_s[endpoint] = loop.time()
            self._say(endpoint, failure)
        try:
            return await self._second.dial(endpoint, deadline_s - (loop.time() - started_s))
        except TransportError as error:
            # It may have been away altogether; next time the better way has its chance again.
            self._failed_at_s.pop(endpoint, None)
            raise type(error)(f"{error}; the direct way: {failure}") from None

    async def _dial_first(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        stream = await self._first.dial(endpoint, deadline_s)
        self._away.pop(endpoint.peer, None)
        _remember(self._reached, endpoint)
        return stream

    def _say(self, endpoint: Endpoint, failure: str) -> None:
        level = logging.DEBUG if endpoint.peer in self._away else logging.INFO
        _remember(self._away, endpoint.peer)
        _log.log(level, "no direct way to %s (%s): trying libp2p", endpoint.peer, failure)

    def _known_failure(self, endpoint: Endpoint, now_s: float) -> str:
        """Why there's no point in dialing `endpoint` directly; empty when there is."""
        if not endpoint.address:
            return "it gives no address"
        since_s = now_s - self._retry_first_s
        self._failed_at_s = {key: at for key, at in self._failed_at_s.items() if at > since_s}
        return "it failed before" if endpoint in self._failed_at_s else ""

    async def close(self) -> None:
        """Close both."""
        async with asyncio.TaskGroup() as closing:
            closing.create_task(self._first.close())
            closing.create_task(self._second.close())


def _remember(known: dict[K, None], key: K) -> None:
    """Note `key` as the newest of `known`, which forgets the oldest of too many."""
    known.pop(key, None)
    known[key] = None
    if len(known) > _REMEMBERED:
        del known[next(iter(known))]
