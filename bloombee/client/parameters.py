"""How the tokens of one prompt are chosen, in a caller's words.

`Sampling` of the protocol is what servers read: for one sequence, with all ids
resolved. `SamplingParams` is what a caller writes, for one prompt.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from bloombee.errors import RequestError
from bloombee.protocol.messages import MOST_BIASES, MOST_STOP_IDS, Sampling

MOST_STOP_STRINGS = 64
MOST_CHOICES = 128
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class _Whole:
    """An integer within bounds."""

    low: int
    high: int

    def check(self, value: object) -> str | None:
        right = type(value) is int and self.low <= value <= self.high
        return None if right else f"give an integer from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class _Number:
    """A finite number within bounds; the lower one may be excluded."""

    low: float
    high: float = math.inf
    above: bool = False

    def check(self, value: object) -> str | None:
        right = type(value) in (int, float) and self._holds(float(value))  # pyright: ignore[reportArgumentType] - a number by now
        word = "above" if self.above else "from"
        until = "" if math.isinf(self.high) else f" to {self.high:g}"
        return None if right else f"give a number {word} {self.low:g}{until}"

    def _holds(self, value: float) -> bool:
        if not math.isfinite(value) or (self.above and value == self.low):
            return False
        return self.low <= value <= self.high


_U32 = (1 << 32) - 1
_RULES: dict[str, _Whole | _Number] = {
    "max_new_tokens": _Whole(1, _U32),
    "min_new_tokens": _Whole(0, _U32),
    "temperature": _Number(0),
    "top_k": _Whole(0, _U32),
    "top_p": _Number(0, 1, above=True),
    "min_p": _Number(0, 1),
    "repetition_penalty": _Number(0, above=True),
    "presence_penalty": _Number(-2, 2),
    "frequency_penalty": _Number(-2, 2),
    "n": _Whole(1, MOST_CHOICES),
}
_OPTIONAL: dict[str, _Whole | _Number] = {
    "seed": _Whole(0, (1 << _SEED_BITS) - 1),
    "logprobs": _Whole(0, 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one prompt are chosen, and when they end.

    `temperature` 0 takes the likeliest. With `seed` the answer depends on the prompt and these
    parameters only. `stop` are texts: the answer ends before the first of them; `stop_ids`
    are tokens that end it beside the model's own (which `ignore_eos` switches off).
    `logprobs` asks for each token's log-probability and that many alternatives. `n`
    answers are drawn to the prompt. Raises RequestError for values that can't be.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            _check(name, getattr(self, name), rule)
        for name, rule in _OPTIONAL.items():
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), rule)
        _check_stops(self.stop_strings)
        _check_ids("stop_ids", self.stop_ids, MOST_STOP_IDS)
        _check_bias(self.logit_bias or {})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, eos_ids: Iterable[int]) -> tuple[Sampling, ...]:
        """What servers are told, for each of the `n` answers.

        Answers that share a seed are told apart by their stream. Without a seed, each call
        draws another one. Raises RequestError when there are too many stop ids.
        """
        own = () if self.ignore_eos else tuple(eos_ids)
        stop_ids = tuple(dict.fromkeys((*own, *self.stop_ids)))
        _check_ids("stop_ids", stop_ids, MOST_STOP_IDS)
        seed = secrets.randbits(_SEED_BITS) if self.seed is None else self.seed
        return tuple(
            Sampling(
                budget=self.max_new_tokens,
                seed=seed,
                stream=stream,
                least=min(self.min_new_tokens, self.max_new_tokens),
                temperature=float(self.temperature),
                top_k=self.top_k,
                top_p=float(self.top_p),
                min_p=float(self.min_p),
                repetition_penalty=float(self.repetition_penalty),
                presence_penalty=float(self.presence_penalty),
                frequency_penalty=float(self.frequency_penalty),
                logit_bias=tuple((id_, float(b)) for id_, b in (self.logit_bias or {}).items()),
                stop_ids=stop_ids,
                logprobs=0 if self.logprobs is None else self.logprobs + 1,
            )
            for stream in range(self.n)
        )


def make_params(params: SamplingParams | None, named: Mapping[str, Any]) -> SamplingParams:
    """`params`, or new ones of `named` fields. Raises RequestError for both, or unknown names."""
    if params is not None:
        if named:
            raise RequestError(
                f"give SamplingParams or {', '.join(named)}, not both: "
                "put all of them into the SamplingParams"
            )
        return params
    known = {field.name for field in fields(SamplingParams)}
    if unknown := [name for name in named if name not in known]:
        raise RequestError(f"{', '.join(unknown)}: unknown; known are {', '.join(sorted(known))}")
    return SamplingParams(**named)


def _check(name: str, value: object, rule: _Whole | _Number) -> None:
    if (mend := rule.check(value)) is not None:
        raise RequestError(f"{name}={value!r}: {mend}")


def _check_stops(stops: tuple[object, ...]) -> None:
    if len(stops) > MOST_STOP_STRINGS:
        raise RequestError(f"stop: {len(stops)} texts; give {MOST_STOP_STRINGS} at most")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop={text!r}: give texts that are not empty")


def _check_ids(name: str, ids: Iterable[object], most: int) -> None:
    listed = list(ids)
    if len(listed) > most:
        raise RequestError(f"{name}: {len(listed)} ids; give {most} at most")
    for id_ in listed:
        if type(id_) is not int or not 0 <= id_ <= _U32 >> 1:
            raise RequestError(f"{name}: {id_!r} is no token id")


def _check_bias(bias: Mapping[int, float]) -> None:
    _check_ids("logit_bias", bias, MOST_BIASES)
    for id_, amount in bias.items():
        _check(f"logit_bias of {id_}", amount, _Number(-100, 100))
