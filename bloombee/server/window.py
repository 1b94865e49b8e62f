"""How much of one session waits on this server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

BEAT_S = 0.5
"""Between our own signs of life while we read nothing."""
IN_FLIGHT_BYTES = 64 << 20
"""What one session may have between our reading it and our having sent it on."""
READ_BYTES = 192 << 20
"""What we read of it in all before we stop to read: signs of life come the same way."""


MESSAGES = 4096
"""As many messages, whatever their size: what is kept of one takes about a kilobyte."""


class Window:
    """Counts the messages and bytes of a session that were read and not yet answered.

    What is over `limit_bytes` waits before it is computed; over `read_limit_bytes`, or
    MESSAGES, no more is read. Anything fits an empty window.
    """

    def __init__(
        self, limit_bytes: int = IN_FLIGHT_BYTES, read_limit_bytes: int = READ_BYTES
    ) -> None:
        self._limit_bytes = limit_bytes
        self._read_limit_bytes = read_limit_bytes
        self._read_bytes = 0
        self._used_bytes = 0
        self._messages = 0
        self._changed = asyncio.Event()

    @property
    def may_read(self) -> bool:
        """Whether more may be read now."""
        return self._read_bytes < self._read_limit_bytes and self._messages < MESSAGES

    def arrived(self) -> None:
        """A message was read that will be answered, or sent on."""
        self._messages += 1

    def answered(self) -> None:
        """That is done."""
        self._messages -= 1
        self._changed.set()

    def read(self, count_bytes: int) -> None:
        """Something was read; it is to `enter` later."""
        self._read_bytes += count_bytes

    def try_enter(self, count_bytes: int) -> bool:
        """Let what was read go on, if it fits."""
        fits = not self._used_bytes or self._used_bytes + count_bytes <= self._limit_bytes
        if fits:
            self._used_bytes += count_bytes
        return fits

    async def enter(self, count_bytes: int) -> None:
        """Wait until what was read fits; one task at a time."""
        while not self.try_enter(count_bytes):
            await self._change()

    async def room(self) -> None:
        """Wait until more may be read."""
        while not self.may_read:
            await self._change()

    async def hold(self, goes_on: Callable[[], bool], beat: Callable[[], Awaitable[None]]) -> None:
        """Wait until more may be read, as long as reading `goes_on`; `beat` says that we live."""
        while goes_on() and not self.may_read:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self.room()
            except TimeoutError:
                await beat()

    def leave(self, count_bytes: int) -> None:
        """What had entered is gone."""
        self._used_bytes -= count_bytes
        self._read_bytes -= count_bytes
        self._changed.set()

    def forget(self, count_bytes: int) -> None:
        """What was read is not to enter."""
        self._read_bytes -= count_bytes
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
