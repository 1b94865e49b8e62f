"""`generate` over a swarm: transformers' own loop, with a cache that lives elsewhere.

Only the seams are ours: which cache a call starts with, what it may not ask for,
where the random numbers of a seeded call come from, and that a call inside an
`inference_session` continues what the servers hold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

from bloombee.client.batch import BatchTerms
from bloombee.client.cache import RemoteCache
from bloombee.client.inference_session import InferenceSession
from bloombee.errors import DeadlineExceeded, RequestError, Unsupported
from bloombee.telemetry import now_s


@dataclass(frozen=True, slots=True)
class _Limit:
    """A call has to be over at `until_s` of the monotonic clock, `given_s` after it began."""

    until_s: float
    given_s: float


_session: ContextVar[InferenceSession | None] = ContextVar("bloombee_session", default=None)
_limit: ContextVar[_Limit | None] = ContextVar("bloombee_limit", default=None)
_made: ContextVar[list[RemoteCache] | None] = ContextVar("bloombee_made", default=None)


class RemoteGenerationMixin(GenerationMixin):
    """What a distributed model overrides of transformers' generation."""

    if TYPE_CHECKING:

        def new_cache(self, terms: BatchTerms) -> RemoteCache:
            """See `DistributedModelForCausalLM`."""
            ...

        def check_length(self, tokens: int) -> None:
            """See `DistributedModelForCausalLM`."""
            ...

        @property
        def request_s(self) -> float:
            """See `DistributedModelForCausalLM`."""
            ...

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *args: Any,
        seed: int | None = None,
        head: str = "auto",
        deadline_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Transformers' `generate`, with three arguments more.

        `seed` makes sampling draw what it would after `torch.manual_seed(seed)`,
        without touching the global generator. `head` says who turns rows into tokens:
        "auto" or "client"; "server" is not available yet. `deadline_s` is how long the
        whole call may take, if less than the settings' `request_s`; DeadlineExceeded is
        raised then, and an `inference_session` can go on afterwards.

        Right-padded rows give what each would give alone. Inside an
        `inference_session`, `inputs` are the whole text so far: what the servers
        hold of it is not computed again. Raises RequestError or Unsupported before
        anything is sent, and the errors of `RemoteSession.step`.
        """
        _check_head(head)
        _check_seed(seed)
        _hear_no_padding_warning()
        with ExitStack() as stack:
            session = self.active_session
            stack.enter_context(_set(_session, None))
            stack.enter_context(self.within(deadline_s))
            if seed is not None:
                stack.enter_context(_SeededDraws(seed))
            made = stack.enter_context(self._closing_caches())
            if session is not None:
                ids = inputs if inputs is not None else kwargs.get("input_ids")
                session.rewind_to_common(ids, kwargs.get("attention_mask"))
                kwargs["cache"] = session.cache
            result: Any = super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue] - transformers types `self` as a protocol that no class meets
            returned = getattr(result, "cache", None)
            made[:] = [each for each in made if each is not returned]
            return result

    @contextmanager
    def within(self, deadline_s: float | None) -> Iterator[None]:
        """What happens inside takes at most `deadline_s` and the settings' `request_s`.

        Raises RequestError unless `deadline_s` is positive. An outer limit goes on.
        """
        if deadline_s is not None and not _is_duration(deadline_s):
            raise RequestError(f"deadline_s={deadline_s!r}: give a positive number of seconds")
        given_s = self.request_s if deadline_s is None else min(self.request_s, deadline_s)
        limit, outer = _Limit(now_s() + given_s, given_s), _limit.get()
        with _set(_limit, limit if outer is None or limit.until_s < outer.until_s else outer):
            yield

    @staticmethod
    def left_s() -> float | None:
        """Seconds that the call has left; None outside of one.

        Raises DeadlineExceeded when there is none.
        """
        limit = _limit.get()
        if limit is None:
            return None
        if (left_s := limit.until_s - now_s()) <= 0:
            raise DeadlineExceeded(
                f"the call took longer than the {limit.given_s:g} s it was given"
            )
        return left_s

    @contextmanager
    def _closing_caches(self) -> Iterator[list[RemoteCache]]:
        """The caches made for one call, closed after it unless taken from the list."""
        made: list[RemoteCache] = []
        with _set(_made, made):
            try:
                yield made
            finally:
                for each in made:
                    each.close()

    @property
    def active_session(self) -> InferenceSession | None:
        """The `inference_session` of this model that the caller is in."""
        session = _session.get()
        return session if session is not None and session.model is self else None

    @contextmanager
    def inference_session(self, max_length: int, batch_size: int = 1) -> Iterator[InferenceSession]:
        """A session for several turns: `generate` and `forward` inside it go on from each other.

        Reserves `batch_size` rows of `max_length` tokens on every stage with the first
        tokens, and frees them at the end. Raises RequestError when the model can't
        hold that many.
        """
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if type(value) is not int or value < 1:
                raise RequestError(f"{name}={value!r}: give a positive integer")
        terms = BatchTerms(batch_size, max_length, growable=False)
        session = InferenceSession(self, self.new_cache(terms))
        try:
            with _set(_session, session):
                yield session
        finally:
            session.cache.close()

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """Put a RemoteCache into `model_kwargs`, or check the one that is there."""
        _check_supported(generation_config)
        _check_mask(model_kwargs.get("attention_mask"))
        self.check_length(max_cache_length + 1)
        repeats = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        held = model_kwargs.get("cache")
        if held is not None:
            _check_held(held, batch_size * repeats, max_cache_length)
            held._is_user_defined = True
        elif generation_config.use_cache is not False:
            terms = BatchTerms(batch_size * repeats, max_cache_length + 1, repeats=repeats)
            made = self.new_cache(terms)
            model_kwargs["cache"] = made
            if (opened := _made.get()) is not None:
                opened.append(made)
        return True

    def _get_deprecated_gen_repo(
        self, generation_mode: GenerationMode, trust_remote_code: bool, custom_generate: Any = None
    ) -> None:
        if custom_generate is None and "/" in GENERATION_MODES_MAPPING[generation_mode]:
            raise Unsupported(
                f"{generation_mode.value} is not possible with a distributed model: "
                "use greedy decoding, sampling, beam search or assisted generation"
            )


class _SeededDraws(TorchFunctionMode):
    """Gives `torch.multinomial` a generator of this thread's call alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.multinomial and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(args[0].device)}
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _check_head(head: str) -> None:
    if head == "server":
        raise Unsupported("head='server' is not available yet: leave it out, or pass 'client'")
    if head not in ("auto", "client"):
        raise RequestError(f"head={head!r} is unknown: pass 'auto' or 'client'")


def _check_seed(seed: object) -> None:
    if seed is not None and not (type(seed) is int and 0 <= seed < 1 << 64):
        raise RequestError(f"seed={seed!r}: give an integer from 0 to 2**64 - 1")


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # pyright: ignore[reportOperatorIssue] - a number by now


def _check_supported(config: GenerationConfig) -> None:
    if config.cache_implementation not in (None, "dynamic"):
        raise Unsupported(
            f"cache_implementation={config.cache_implementation!r} is not possible with a "
            "distributed model, whose servers hold the cache: leave it out"
        )
    if config.assistant_early_exit is not None:
        raise Unsupported(
            "assistant_early_exit is not possible with a distributed model, whose blocks are "
            "elsewhere: pass assistant_model or prompt_lookup_num_tokens"
        )


def _check_mask(mask: torch.Tensor | None) -> None:
    if mask is None:
        return
    empty = (mask.sum(-1) == 0).nonzero()
    if len(empty):
        raise RequestError(
            f"row {int(empty[0])} of the batch has no unmasked token: give it at least one"
        )


def _check_held(held: object, rows: int, columns: int) -> None:
    if not isinstance(held, RemoteCache):
        raise RequestError(
            f"the cache is a {type(held).__name__}: leave it out, or pass one of this model's"
        )
    terms = held.batch.terms
    if held.batch.rows != rows:
        raise RequestError(
            f"the cache holds {held.batch.rows} rows, this call has {rows}: "
            "use a session of that batch_size, or no beams and one return sequence"
        )
    if not terms.growable and columns > terms.max_length:
        raise RequestError(
            f"generating up to {columns + 1} tokens needs a session of max_length={columns}, "
            f"this one has {terms.max_length}: open a longer one or lower max_new_tokens"
        )


@cache
def _hear_no_padding_warning() -> None:
    """Silence transformers' warning of right padding where it is wrong: in our own calls."""

    def keep(record: logging.LogRecord) -> bool:
        return _made.get() is None or "right-padding was detected" not in record.msg

    logging.getLogger("transformers.generation.utils").addFilter(keep)
