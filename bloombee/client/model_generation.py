"""`generate` over a swarm: transformers' own loop, with a cache that lives elsewhere.

Only the seams are ours: which cache a call starts with, what it may not ask for, who
chooses the tokens, where the random numbers of a seeded call come from, and that a call
inside an `inference_session` continues what the servers hold.
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
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

from bloombee.client.batch import BatchTerms, RemoteBatch
from bloombee.client.cache import RemoteCache
from bloombee.client.inference_session import InferenceSession
from bloombee.client.model_decoding import RemoteDecodingMixin
from bloombee.client.seeded_draws import SeededDraws
from bloombee.client.server_head import Arguments
from bloombee.errors import DeadlineExceeded, RequestError, Unsupported
from bloombee.telemetry import now_s

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Limit:
    """A call has to be over at `until_s` of the monotonic clock, `given_s` after it began."""

    until_s: float
    given_s: float


@dataclass(frozen=True, slots=True)
class _Head:
    """Who chooses the tokens of a call, and with which seed."""

    name: str
    seed: int | None


_AUTO = _Head("auto", None)
_head: ContextVar[_Head] = ContextVar("bloombee_head", default=_AUTO)
_session: ContextVar[InferenceSession | None] = ContextVar("bloombee_session", default=None)
_limit: ContextVar[_Limit | None] = ContextVar("bloombee_limit", default=None)
_made: ContextVar[list[RemoteCache] | None] = ContextVar("bloombee_made", default=None)


class RemoteGenerationMixin(RemoteDecodingMixin, GenerationMixin):
    """What a distributed model overrides of transformers' generation."""

    if TYPE_CHECKING:

        def new_cache(self, terms: BatchTerms) -> RemoteCache:
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

        `head` says who chooses the tokens. "server": the last stage, which sends them to
        the first, so that no token waits for the client; a batch decodes as several
        micro-batches that don't wait for each other. "client": transformers, here. "auto"
        is the server head for greedy decoding and for sampling with `seed`, unless the call
        asks for what only transformers does (other processors and criteria, scores, beams).
        Tokens are the same. With `return_dict_in_generate` a batch is one micro-batch, whose
        cache is returned for a later call to go on from.

        `seed` makes sampling repeatable: row r of the batch draws its n-th token with the
        generator of `models.drawing`, from (seed, r, n) alone, whoever chooses. Without it
        transformers draws from torch's global generator. `deadline_s` is how long the
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
            stack.enter_context(_set(_head, _Head(head, seed)))
            if seed is not None:
                stack.enter_context(SeededDraws(seed))
            made = stack.enter_context(self._closing_caches())
            if session is not None:
                ids = inputs if inputs is not None else kwargs.get("input_ids")
                session.rewind_to_common(ids, kwargs.get("attention_mask"))
                kwargs["cache"] = session.cache
            result: Any = super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue] - transformers types `self` as a protocol that no class meets
            returned = getattr(result, "cache", None)
            made[:] = [each for each in made if each is not returned]
            return result

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Greedy decoding and sampling: by the servers where they can and may, else here."""
        head = _head.get()
        arguments = Arguments(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        if head.name != "client":
            returns_cache = bool(generation_config.return_dict_in_generate)
            held = self._held_batch(model_kwargs.get("cache"), is_kept=returns_cache)
            try:
                self._check_barrier()
                request = arguments.request(held, head.seed, self.vocabulary)
            except Unsupported as reason:
                if head.name == "server":
                    raise
                _log.debug("the client chooses the tokens: %s", reason)
            else:
                answers = arguments.answers(streamer)
                for tokens in self.stream_tokens(request, held):
                    answers.take(tokens)
                return arguments.result(answers.finish())
        return super()._sample(  # pyright: ignore[reportAttributeAccessIssue] - as for generate
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _check_barrier(self) -> None:
        if self.settings.barrier:
            raise Unsupported(
                "head='server' has no barrier between micro-batches: leave barrier out of the "
                "client's settings, or the head to the client"
            )

    @staticmethod
    def _held_batch(cache: RemoteCache | None, *, is_kept: bool) -> RemoteBatch | None:
        """What a call continues; None when its cache was made for it alone, and is not kept."""
        made = _made.get() or []
        is_own = any(cache is each for each in made) and not is_kept
        return None if cache is None or is_own else cache.batch

    @contextmanager
    def within(self, deadline_s: float | None) -> Iterator[None]:
        """What happens inside takes at most `deadline_s` and the settings' `request_s`.

        Raises RequestError unless `deadline_s` is positive. An outer limit goes on.
        """
        if deadline_s is not None and not _is_duration(deadline_s):
            raise RequestError(f"deadline_s={deadline_s!r}: give a positive number of seconds")
        longest_s = self.settings.request_s
        given_s = longest_s if deadline_s is None else min(longest_s, deadline_s)
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


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _check_head(head: str) -> None:
    if head not in ("auto", "client", "server"):
        raise RequestError(f"head={head!r} is unknown: pass 'auto', 'client' or 'server'")


def _check_seed(seed: object) -> None:
    if seed is not None and not (type(seed) is int and 0 <= seed < 1 << 63):
        raise RequestError(f"seed={seed!r}: give an integer from 0 to 2**63 - 1")


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
