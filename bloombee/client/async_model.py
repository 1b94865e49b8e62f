"""The model for programs that run an event loop: web servers, notebooks, agents.

The name follows the pairs that Python's users know: InferenceClient and
AsyncInferenceClient, OpenAI and AsyncOpenAI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from bloombee.client.auto import AutoDistributedModelForCausalLM
from bloombee.client.completions import Completion, Delta, answer, complete
from bloombee.client.many import as_request
from bloombee.client.model import DistributedModelForCausalLM
from bloombee.client.parameters import SamplingParams, make_params
from bloombee.client.prompts import Job, Prompt, Request, prepare


class AsyncDistributedModelForCausalLM:
    """A distributed model whose answers are awaited; many at a time, in any asyncio loop.

        async for delta in model.stream("Why do bees dance?", max_new_tokens=50):
            print(delta.text, end="")

    `model` is the one it stands on, which may be used beside it.
    """

    def __init__(self, model: DistributedModelForCausalLM) -> None:
        self.model = model

    @classmethod
    async def from_pretrained(cls, model: str, **arguments: Any) -> Self:
        """As `AutoDistributedModelForCausalLM.from_pretrained`, in a thread meanwhile."""
        load = partial(AutoDistributedModelForCausalLM.from_pretrained, model, **arguments)
        return cls(await asyncio.to_thread(load))

    async def stream(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None = None,
        *,
        deadline_s: float | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[Delta, None]:
        """The answer to a prompt (text, token ids or messages), token by token.

        `parameters` are fields of SamplingParams. Closing the iterator (`aclose`, leaving
        `async for` by an exception, cancelling the task) frees what servers hold; after
        `break` it is closed when it is collected: `contextlib.aclosing` closes it at once.
        Raises RequestError before anything is sent, and the errors of `decode`.
        """
        job = await self._prepare(prompt, params, parameters)
        async with aclosing(answer(self.model, job, self.model.words, deadline_s)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None = None,
        *,
        deadline_s: float | None = None,
        **parameters: Any,
    ) -> Completion:
        """The whole answer to a prompt; arguments and errors are those of `stream`."""
        job = await self._prepare(prompt, params, parameters)
        return await complete(self.model, job, self.model.words, deadline_s)

    async def _prepare(
        self, prompt: Prompt | Request, params: SamplingParams | None, named: dict[str, Any]
    ) -> Job:
        request = as_request(prompt, make_params(params, named))

        def work() -> Job:  # the first reads the tokenizer, which takes a while
            return prepare(0, request, self.model.words, self.model.limits)

        return await asyncio.to_thread(work)

    async def close(self) -> None:
        """Leave the swarm, for `model` too."""
        await asyncio.to_thread(self.model.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
