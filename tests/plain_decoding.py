"""`decode` the plain way: rows come back to the client, which chooses the tokens.

The twin of the servers' own loop, and the proof that what stands on `decode` runs with
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
from bloombee.errors import DeadlineExceeded
from bloombee.models.sampling import Chooser, choose
from bloombee.telemetry import now_s

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from bloombee.client.model import DistributedModelForCausalLM
    from bloombee.protocol.messages import Sampling


class PlainDecoding:
    """Offers `decode` over a model's `forward`, every row in a session of its own."""

    def __init__(self, model: DistributedModelForCausalLM) -> None:
        self._model = model

    async def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> AsyncGenerator[Token, None]:
        """See `Decodes`; raises the same."""
        model = self._model
        limit_s = model.settings.request_s if deadline_s is None else deadline_s
        until_s = now_s() + limit_s
        rows = [Row(model, *each) for each in zip(prompts, sampling, strict=True)]
        going = dict(enumerate(rows))
        try:
            while going:
                for number, row in list(going.items()):
                    if (left_s := until_s - now_s()) <= 0:
                        raise DeadlineExceeded(f"the call took longer than its {limit_s:g} s")
                    token = await asyncio.to_thread(row.step, number, left_s)
                    if token.finished:
                        del going[number]
                    yield token
        finally:
            for row in rows:
                await asyncio.to_thread(row.close)


class Row:
    """One prompt and what follows it. Its methods block, and wait for each other."""

    def __init__(
        self, model: DistributedModelForCausalLM, prompt: Sequence[int], sampling: Sampling
    ) -> None:
        context = np.array(prompt, "<i4").tobytes()
        asked = msgspec.structs.replace(sampling, context=context)
        self._model = model
        self._chooser = Chooser.of(asked, model.source.vocab_size)
        self._new = torch.tensor([list(prompt)])
        self._cache: Any = None
        self._is_closed = False
        self._turn = threading.Lock()

    def step(self, number: int, left_s: float) -> Token:
        """The next token, of row `number`."""
        with self._turn, self._model.within(left_s):
            if self._is_closed:
                raise DeadlineExceeded("the call was given up")
            found: Any = self._model(self._new, cache=self._cache, use_cache=True, logits_to_keep=1)
            self._cache = found.cache
            (chosen,) = choose(found.logits[0, -1:], [self._chooser])
        self._new = torch.tensor([[chosen.token]])
        logprob = chosen.logprob if self._chooser.sampling.logprobs else None
        return Token(number, chosen.token, chosen.finished, logprob, chosen.alternatives)

    def close(self) -> None:
        """Free what servers hold, after a step that nobody waits for any more."""
        with self._turn:
            self._is_closed = True
            if self._cache is not None:
                self._cache.close()
