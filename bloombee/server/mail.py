"""Tokens on their way to a client that may be slower than its loop."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from bloombee.protocol.messages import Output

MESSAGES = 2048
MAIL_BYTES = 8 << 20
MESSAGE_BYTES = 512
"""What keeping one takes besides its tokens, about."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One output, its payload, and about what it takes."""

    output: Output
    body: bytes
    kept_bytes: int


class Mail:
    """Outputs in order, sent by a task of their own. Whoever posts waits for room first."""

    def __init__(self, messages: int = MESSAGES, limit_bytes: int = MAIL_BYTES) -> None:
        self._messages = messages
        self._limit_bytes = limit_bytes
        self._letters: deque[Letter] = deque()
        self._kept_bytes = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._letters)

    @property
    def has_room(self) -> bool:
        """Whether one more may be posted."""
        return len(self._letters) < self._messages and self._kept_bytes < self._limit_bytes

    def post(self, output: Output, body: bytes, kept_bytes: int) -> None:
        """Add one at the end."""
        letter = Letter(output, body, MESSAGE_BYTES + kept_bytes)
        self._letters.append(letter)
        self._kept_bytes += letter.kept_bytes
        self._changed.set()

    async def first(self) -> Letter:
        """The oldest, once there is one; it stays until `sent`."""
        while not self._letters:
            await self._change()
        return self._letters[0]

    def sent(self) -> None:
        """The oldest is on its way."""
        self._kept_bytes -= self._letters.popleft().kept_bytes
        self._changed.set()

    async def room(self) -> None:
        """Wait until one more may be posted."""
        while not self.has_room:
            await self._change()

    async def empty(self) -> None:
        """Wait until all are on their way."""
        while self._letters:
            await self._change()

    async def _change(self) -> None:
        # Each waiter looks again after any change, so a fresh event a change serves all of them.
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()
