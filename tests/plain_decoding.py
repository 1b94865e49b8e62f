"""`decode` the plain way: rows come back to the client, which chooses the tokens.

The twin of the server's own loop, and the proof that what stands on `decode` runs with
the client head as well.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from bloombee.client.decoding import Token
from bloombee.models.sampling import Chooser, choose

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.protocol.messages import Sampling


class PlainDecoding:
    """`decode` over `forward`, every row in a session of its own."""

    def __init__(self, model: DistributedModelForCausalLM) -> None:
        self._model = model

    async def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Token, None]:
        rows = [
            Row(self._model, prompt, asked) for prompt, asked in zip(prompts, sampling, strict=True)
        ]
        going = dict(enumerate(rows))
        try:
            while going:
                for number, row in list(going.items()):
                    token = await asyncio.shield(asyncio.to_thread(row.step, number))
                    if token.finished:
                        del going[number]
                    yield token
        finally:
            for row in rows:
                await asyncio.to_thread(row.close)


class Row:
    def __init__(
        self, model: DistributedModelForCausalLM, prompt: Sequence[int], sampling: Sampling
    ) -> None:
        context = np.array(prompt, "<i4").tobytes()
        filled = msgspec.structs.replace(sampling, context=context)
        self._model = model
        self._chooser = Chooser.of(filled, model.source.vocab_size)
        self._next = torch.tensor([list(prompt)])
        self._cache: Any = None
        self._turn = threading.Lock()

    def step(self, number: int) -> Token:
        with self._turn:
            return self._step(number)

    def _step(self, number: int) -> Token:
        found: Any = self._model(self._next, cache=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = found.cache
        (chosen,) = choose(found.logits[0, -1:], [self._chooser])
        self._next = torch.tensor([[chosen.token]])
        return Token(number, chosen.token, chosen.finished, chosen.logprob, chosen.alternatives)

    def close(self) -> None:
        with self._turn:  # a step that nobody waits for any more may still run
            if self._cache is not None:
                self._cache.close()
