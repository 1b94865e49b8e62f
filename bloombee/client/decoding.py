"""Tokens chosen on the servers, as they come.

The client's own loop does the work, whichever thread or loop waits for the tokens; they
are handed over in as large bunches as the reader lets them become.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from bloombee.client.tokens import Finished, Token
from bloombee.errors import RequestError
from bloombee.protocol.messages import Sampling

__all__ = ["Decodes", "Finished", "Mailbox", "Token", "check_prompts"]

_log = logging.getLogger(__name__)


class Decodes(Protocol):
    """What `DistributedModelForCausalLM` offers to whoever wants tokens one by one."""

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> AsyncGenerator[Token, None]:
        """See `DistributedModelForCausalLM`."""
        ...


class Mailbox:
    """Tokens on their way from the client's loop to a reader in the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[Token] = deque()
        self._filled = asyncio.Event()
        self._is_waking = False
        self._is_closed = False

    def put(self, tokens: Sequence[Token]) -> None:
        """More tokens; from any thread."""
        self._tokens.extend(tokens)
        self._wake()

    def close(self) -> None:
        """No more tokens come; from any thread."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._is_waking:
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._filled.set)
        except RuntimeError:
            _log.debug("the loop of whoever read tokens is closed")

    async def __aiter__(self) -> AsyncIterator[Token]:
        """The tokens, until it is closed."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            self._is_waking = False
            is_closed = self._is_closed  # before the tokens: none comes after
            if is_closed:
                self._filled.set()  # before they are given: whoever leaves at one may wait again
            while self._tokens:
                yield self._tokens.popleft()
            if is_closed:
                return

    async def closed(self) -> None:
        """Wait until it is closed; what it holds is dropped."""
        async for _ in self:
            continue


def check_prompts(
    prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], vocabulary: int
) -> None:
    """Raise RequestError unless every prompt has ids of the vocabulary, and a sampling."""
    if not prompts or len(prompts) != len(samplings):
        raise RequestError(
            f"{len(prompts)} prompts with {len(samplings)} samplings: give one for each prompt, "
            "and at least one"
        )
    for row, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        if not len(ids):
            raise RequestError(f"prompt {row} is empty: give it at least one token")
        outside = [token for token in (min(ids), max(ids)) if not 0 <= token < vocabulary]
        if outside:
            raise RequestError(
                f"token id {outside[0]} of prompt {row} is outside the model's vocabulary of "
                f"{vocabulary}: use the model's own tokenizer"
            )
        if sampling.budget < 1:
            raise RequestError(f"prompt {row} asks for no tokens: give it a budget of at least 1")
