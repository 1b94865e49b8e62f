"""`generate_many`: thousands of prompts through one swarm, none waiting for another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from bloombee.client.completions import Completion, failure
from bloombee.client.crew import Crew, Terms
from bloombee.client.loop import LoopThread
from bloombee.client.parameters import SamplingParams, make_params
from bloombee.client.prompts import Job, Limits, Prompt, Request, Words, prepare
from bloombee.errors import BloomBeeError, ModelError, RequestError, Unsupported

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from bloombee.client.decoding import Token
    from bloombee.config.client import ClientSettings
    from bloombee.models import ModelSource
    from bloombee.protocol.messages import Sampling

IN_FLIGHT = 48
"""Prompts in flight, if not told: a server allows a client 64 sessions, and this fills
the passes of a dozen stages. Where KV is short there are fewer, see `crew.Places`."""
_AHEAD = 2
"""Prompts are made ready for this many times those in flight, so that none is waited for."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the jobs of one call come from, and how many are made ready ahead."""

    requests: Iterator[tuple[int, Request]]
    prepare: Callable[[int, Request], Job]
    window: int


class Answers(Iterator[Completion]):
    """What `generate_many` gives. Leaving it, in whatever way, frees what servers hold."""

    def __init__(self, source: _Source, crew: Crew, loop: LoopThread, *, ordered: bool) -> None:
        self._source = source
        self._crew = crew
        self._loop = loop
        self._ordered = ordered
        self._given = 0
        self._running = 0
        self._results: dict[int, Completion] = {}
        self._is_open = True

    def __next__(self) -> Completion:
        """The next result. Raises StopIteration after the last, and what the prompts raise."""
        while self._is_open:
            try:
                self._feed()
                if (result := self._pop()) is not None:
                    return result
                if not self._running:
                    self.close()
                else:
                    self._collect()
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def _feed(self) -> None:
        jobs = list[Job]()
        while self._running + len(jobs) < self._source.window:
            if (numbered := next(self._source.requests, None)) is None:
                break
            try:
                jobs.append(self._source.prepare(*numbered))
            except BloomBeeError as error:
                self._results[numbered[0]] = failure(*numbered, error)
        if jobs:
            self._loop.run(self._crew.add(jobs))
            self._running += len(jobs)

    def _pop(self) -> Completion | None:
        number = self._given if self._ordered else next(iter(self._results), -1)
        result = self._results.pop(number, None)
        self._given += result is not None
        return result

    def _collect(self) -> None:
        for result in self._loop.run(self._crew.wait(), self._crew.put_back):
            self._results[result.index] = result
            self._running -= 1

    def close(self) -> None:
        """End what is in flight and wait until servers are told."""
        if self._is_open:
            self._is_open = False
            if self._loop.is_open:
                self._loop.run(self._crew.close())

    def finished(self) -> list[Completion]:
        """After `close`: results that had come and were not given."""
        kept = [*self._results.values(), *self._crew.ended()]
        self._results = {}
        return kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.post(self._crew.close())


class ManyPromptsMixin:
    """What a distributed model has for prompts by the thousand, and one by one as they come."""

    if TYPE_CHECKING:
        source: ModelSource
        generation_config: GenerationConfig

        @property
        def loop(self) -> LoopThread:
            """See `DistributedModelForCausalLM`."""
            ...

        @property
        def settings(self) -> ClientSettings:
            """See `DistributedModelForCausalLM`."""
            ...

        def decode(
            self,
            prompts: Sequence[Sequence[int]],
            sampling: Sequence[Sampling],
            *,
            deadline_s: float | None = None,
            background: bool = False,
        ) -> AsyncGenerator[Token, None]:
            """See `Decodes`."""
            ...

    def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        params: SamplingParams | None = None,
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        deadline_s: float | None = None,
        on_token: Callable[[], None] = lambda: None,
        **parameters: Any,
    ) -> Answers:
        """Answer many prompts: texts, token ids, chats, or a Request with its own parameters.

        Gives a Completion for each prompt, in their order or (`ordered=False`) as they
        finish; one that fails has the `error` of its own, after the settings' `recovery_s` if
        the swarm is at fault. `params`, or `parameters`, which
        are fields of SamplingParams, hold for prompts that are no Request. `concurrency`
        prompts are in flight, fewer where servers have no room; a finished one is replaced
        at once. `prompts` may be a generator and is read only as far ahead as needed.
        `deadline_s` is for each prompt. `on_token` is called, in another thread, for every
        token that comes. What an answer is does not depend on order or concurrency. Servers let
        other clients' `generate` and `stream` go first, without stopping this.

        Leaving the loop over the results, an exception, or Ctrl-C frees the servers. Raises
        RequestError for arguments that can't be.
        """
        common = make_params(params, parameters)
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise RequestError(f"concurrency={concurrency!r}: give a positive integer")
        if isinstance(prompts, (str, Request)):
            raise RequestError("prompts are a list or a generator: put a single one into a list")
        requests = (as_request(prompt, common) for prompt in prompts)
        ready = partial(prepare, words=self.words, limits=self.limits)
        terms = Terms(concurrency or IN_FLIGHT, self.patience_s, deadline_s, on_token)
        crew = Crew(self, self.words, terms, self.loop.tasks)
        source = _Source(enumerate(requests), ready, _AHEAD * terms.concurrency)
        return Answers(source, crew, self.loop, ordered=ordered)

    @property
    def patience_s(self) -> float:
        """How long a prompt waits for a swarm that can't answer it, by the settings."""
        return self.settings.recovery_s

    @property
    def words(self) -> Words:
        """The model's tokenizer, or that there is none; read once."""
        words: Words | None = self.__dict__.get("_words")
        if words is None:
            try:
                words = Words(self.source.tokenizer())
            except ModelError:
                words = Words(None)
            self.__dict__["_words"] = words
        return words

    @property
    def limits(self) -> Limits:
        """What the model takes, and which tokens end an answer."""
        eos: int | list[int] | None = self.generation_config.eos_token_id
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        source = self.source
        return Limits(source.name, source.max_length, source.vocab_size, tuple(listed))

    # What transformers has for it ---------------------------------------------------------

    def generate_batch(self, *_: object, **__: object) -> NoReturn:
        """Raises Unsupported: see `generate_many`."""
        _no_paged_cache("generate_batch")

    def init_continuous_batching(self, *_: object, **__: object) -> NoReturn:
        """Raises Unsupported: see `generate_many`."""
        _no_paged_cache("init_continuous_batching")

    def continuous_batching_context_manager(self, *_: object, **__: object) -> NoReturn:
        """Raises Unsupported: see `generate_many`."""
        _no_paged_cache("continuous_batching_context_manager")


def as_request(prompt: Prompt | Request, common: SamplingParams) -> Request:
    """The prompt with the parameters that hold for it."""
    return prompt if isinstance(prompt, Request) else Request(prompt, common)


def _no_paged_cache(what: str) -> NoReturn:
    raise Unsupported(
        f"{what} is not possible with a distributed model, whose servers hold the cache: "
        "use model.generate_many(prompts, ...)"
    )
