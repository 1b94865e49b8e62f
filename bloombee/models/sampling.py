"""How tokens are chosen from logits: the server head, and the client's when it has a seed.

    choosers = [Chooser.of(sampling, vocab_size) for sampling in ...]  # one a sequence
    chosen = choose(logits, choosers)  # a token for each row; the choosers move on

See `scores` for the processing of logits and `drawing` for the generator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from jaxtyping import Float

from bloombee.errors import RequestError, StepFailed
from bloombee.models.drawing import draw, gumbel
from bloombee.models.scores import has_penalties, needs_processing, processed
from bloombee.protocol.messages import End, Sampling

__all__ = ["Chooser", "Chosen", "advance", "choose", "draw", "gumbel", "pick"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token; if asked for, its log-probability and the likeliest tokens with theirs.

    Log-probabilities are the model's own, before any processing. `finished`: why the
    sequence ends with this token.
    """

    token: int
    logprob: float = 0.0
    alternatives: tuple[tuple[int, float], ...] = ()
    finished: End = ""


@dataclass(slots=True, eq=False)
class Chooser:
    """Chooses the tokens of one sequence; every one moves it on.

    `drawn` tokens were chosen so far, `left` more may follow. While steps of the sequence wait
    for the compute thread, it is that thread's alone.
    """

    sampling: Sampling
    drawn: int
    left: int
    stop_ids: frozenset[int]
    is_plain: bool
    _seen: dict[int, None] = field(default_factory=dict[int, None])
    _counts: Counter[int] = field(default_factory=Counter[int])
    _keeps: bool = False

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> Self:
        """A chooser of what the client asks for. Raises RequestError for what makes no sense."""
        context = np.frombuffer(sampling.context, "<i4") if not len(sampling.context) % 4 else None
        _check(sampling, context, vocab_size)
        chooser = cls(
            sampling,
            sampling.drawn,
            sampling.budget,
            frozenset(sampling.stop_ids),
            not (needs_processing(sampling) or sampling.logprobs),
            _keeps=has_penalties(sampling),
        )
        if chooser._keeps and context is not None:
            ids: list[int] = context.tolist()
            chooser._seen = dict.fromkeys(ids)
            chooser._counts = Counter(ids[len(ids) - sampling.drawn :])
        return chooser

    def pick(self, logits: Float[torch.Tensor, "V"]) -> Chosen:
        """The token for a row of finite logits. Raises StepFailed when none is possible."""
        sampling = self.sampling
        scores = processed(logits, sampling, self.drawn, list(self._seen), self._counts)
        if sampling.temperature:
            chances = scores.softmax(-1)[None]
            token = int(draw(chances, sampling.seed, [sampling.stream], [self.drawn]))
        else:
            token = int(scores.argmax())
            if not math.isfinite(scores[token]):
                raise StepFailed("no token is possible: bias and stop ids exclude all of them")
        return self.chosen(token, logits)

    def chosen(self, token: int, logits: Float[torch.Tensor, "V"] | None = None) -> Chosen:
        """What is told of `token`, chosen from `logits`."""
        finished: End = "length" if self.left <= 1 else ""
        if token in self.stop_ids:
            finished = "stop"
        if logits is None or not self.sampling.logprobs:
            return Chosen(token, finished=finished)
        logprobs = logits.log_softmax(-1)
        count = min(self.sampling.logprobs - 1, len(logprobs))
        values, ids = torch.topk(logprobs, count)
        likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Chosen(token, float(logprobs[token]), likeliest, finished)

    def advance(self, token: int) -> None:
        """Move on past a token."""
        self.drawn += 1
        self.left -= 1
        if self._keeps:
            self._seen[token] = None
            self._counts[token] += 1


def choose(logits: Float[torch.Tensor, "R V"], choosers: Sequence[Chooser]) -> tuple[Chosen, ...]:
    """A token for each row, by its chooser. Modifies the choosers, all of them or none.

    Of equally good tokens the first is taken. Raises StepFailed for logits that are
    not finite, and where no token is possible.
    """
    chosen = pick(logits, choosers)
    advance(choosers, chosen)
    return chosen


def advance(choosers: Sequence[Chooser], chosen: Sequence[Chosen]) -> None:
    """Move each chooser on past the token that it chose."""
    for chooser, each in zip(choosers, chosen, strict=True):
        chooser.advance(each.token)


def pick(logits: Float[torch.Tensor, "R V"], choosers: Sequence[Chooser]) -> tuple[Chosen, ...]:
    """As `choose`, but the choosers stay where they are."""
    if not choosers:
        return ()
    _check_finite(logits)
    plain = [row for row, chooser in enumerate(choosers) if chooser.is_plain]
    chosen: dict[int, Chosen] = {}
    if plain:
        best = (logits if len(plain) == len(choosers) else logits[plain]).argmax(-1)
        for row, token in zip(plain, best.tolist(), strict=True):
            chosen[row] = choosers[row].chosen(token)
    others = [row for row in range(len(choosers)) if row not in chosen]
    if others:
        on_host = logits[others].float().cpu()
        for row, scores in zip(others, on_host, strict=True):
            chosen[row] = choosers[row].pick(scores)
    return tuple(chosen[row] for row in range(len(choosers)))


def _check_finite(logits: torch.Tensor) -> None:
    low, high = torch.stack(torch.aminmax(logits)).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise StepFailed(
            f"the model's logits are not finite (from {low} to {high}): "
            "the weights are broken, or their dtype is too narrow"
        )


def _check(sampling: Sampling, context: np.ndarray | None, vocab_size: int) -> None:
    wrong = _wrong_number(sampling)
    if wrong:
        raise RequestError(f"sampling: {wrong}")
    if sampling.budget < 1:
        raise RequestError("sampling: a budget of no tokens: ask for at least one")
    if context is None:
        raise RequestError("sampling: the context is no list of 4-byte ids")
    ids = [token for token, _ in sampling.logit_bias] + list(sampling.stop_ids)
    if context.size:
        ids += [int(context.max()), int(context.min())]
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"sampling: id {outside[0]} is none of the model's {vocab_size} tokens: "
            "leave it out of biases, stop ids and context"
        )
    if has_penalties(sampling) and sampling.drawn > context.size:
        raise RequestError(
            f"sampling: {sampling.drawn} tokens were drawn, the context has {context.size}: "
            "penalties need all of them"
        )


def _wrong_number(sampling: Sampling) -> str:
    """The first parameter that makes no sense, and what it may be."""
    ranges = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf),
        *((f"bias of {token}", bias, -math.inf, math.inf) for token, bias in sampling.logit_bias),
    )
    for name, value, low, high in ranges:
        if not (math.isfinite(value) and low <= value <= high):
            return f"{name} {value} is not from {low} to {high}"
    if not 0.0 < sampling.repetition_penalty < math.inf:
        return f"repetition_penalty {sampling.repetition_penalty} is not above 0"
    return ""
