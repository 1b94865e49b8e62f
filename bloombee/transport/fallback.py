"""A dialer that tries the direct way first and another when that fails."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bloombee.errors import TransportError

if TYPE_CHECKING:
    from bloombee.transport.interface import Dialer, Endpoint, Stream

_log = logging.getLogger(__name__)


class FallbackDialer:
    """`Dialer` over two: `first` gets half of the deadline, `second` the rest.

    An endpoint where `first` failed is dialed by `second` at once for `retry_first_s`;
    a peer behind NAT would otherwise cost that half of the deadline each time. A wrong
    certificate (AuthError) is no reason to look for another way.
    """

    def __init__(self, first: Dialer, second: Dialer, retry_first_s: float = 60.0) -> None:
        self._first = first
        self._second = second
        self._retry_first_s = retry_first_s
        self._failed_at_s: dict[Endpoint, float] = {}

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        """A new stream by either way; raises what `second` raises, naming both failures."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        failed_at_s = self._failed_at_s.get(endpoint)
        reason = "it failed before"
        if failed_at_s is None or started_s - failed_at_s > self._retry_first_s:
            try:
                stream = await self._first.dial(endpoint, deadline_s / 2)
            except TransportError as error:
                self._failed_at_s[endpoint] = loop.time()
                reason = str(error)
                _log.info("no direct way to %s (%s): trying another", endpoint.peer, reason)
            else:
                self._failed_at_s.pop(endpoint, None)
                return stream
        try:
            return await self._second.dial(endpoint, deadline_s - (loop.time() - started_s))
        except TransportError as error:
            raise type(error)(f"{error}; the direct way: {reason}") from None

    async def close(self) -> None:
        """Close both."""
        async with asyncio.TaskGroup() as closing:
            closing.create_task(self._first.close())
            closing.create_task(self._second.close())
