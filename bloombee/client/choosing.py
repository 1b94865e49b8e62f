"""Transformers' processors and stopping criteria, as what servers choose tokens by.

Only what is known exactly, in the order in which servers apply it, is translated; a
subclass may do anything, and stays with the client head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from msgspec.structs import replace
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from bloombee.client.payloads import ids_bytes
from bloombee.errors import Unsupported
from bloombee.protocol.messages import MOST_BIASES, MOST_STOP_IDS, Sampling


@dataclass(slots=True)
class _Choice:
    """What processors and criteria come to; `ignored` are the columns penalties don't look at."""

    columns: int
    max_length: int | None = None
    stop_ids: set[int] = field(default_factory=set[int])
    guarded: list[set[int]] = field(default_factory=list[set[int]])
    """Stop ids as each processor sees them that keeps a row from ending too early."""
    least: int = 0
    bias: dict[int, float] = field(default_factory=dict[int, float])
    penalty: float = 1.0
    ignored: int | torch.Tensor = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Seeding:
    """Sampling with `seed`, or, without, the likeliest token."""

    seed: int | None


def samplings(
    ids: Int[torch.Tensor, "B S"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    seeding: Seeding,
) -> list[Sampling]:
    """How servers choose the tokens of each row, whose text so far is `ids`.

    Raises Unsupported for what servers can't do in the same way.
    """
    choice = _Choice(ids.shape[1])
    for each in stopping_criteria:
        _STOPS.get(type(each), _unknown)(choice, each)
    order = -1
    for each in logits_processor:
        place, translate = _PROCESSORS.get(type(each), (order + 1, _unknown))
        if place <= order or (place >= _WARPERS and seeding.seed is None):
            _refuse(f"{type(each).__name__} in this place")
        translate(choice, each)
        order = place
    _check(choice)
    return [_sampling(choice, row, ids[row], seeding) for row in range(len(ids))]


def _check(choice: _Choice) -> None:
    if choice.max_length is None:
        _refuse("generation without a longest length")
    if any(guarded != choice.stop_ids for guarded in choice.guarded):
        _refuse("a least length for other tokens than those that end a row")
    if len(choice.stop_ids) > MOST_STOP_IDS or len(choice.bias) > MOST_BIASES:
        _refuse("so many stop tokens or biases")


def _sampling(
    choice: _Choice, row: int, ids: Int[torch.Tensor, " S"], seeding: Seeding
) -> Sampling:
    budget = max(1, (choice.max_length or 0) - choice.columns)
    context = b""
    if choice.penalty != 1.0:
        ignored = choice.ignored
        start = ignored if isinstance(ignored, int) else int(ignored[row])
        context = ids_bytes(ids[start:].tolist())
    sampling = Sampling(
        budget=budget,
        stream=row,
        least=choice.least,
        repetition_penalty=choice.penalty,
        logit_bias=tuple(sorted(choice.bias.items())),
        stop_ids=tuple(sorted(choice.stop_ids)),
        context=context,
    )
    if seeding.seed is None:
        return sampling
    return replace(
        sampling,
        seed=seeding.seed,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        min_p=choice.min_p,
    )


# Criteria ---------------------------------------------------------------------------


def _max_length(choice: _Choice, each: criteria.MaxLengthCriteria) -> None:
    known = choice.max_length
    choice.max_length = each.max_length if known is None else min(known, each.max_length)


def _stop_ids(choice: _Choice, each: criteria.EosTokenCriteria) -> None:
    choice.stop_ids |= _ids(each.eos_token_id)


# Processors -------------------------------------------------------------------------


def _bias(choice: _Choice, each: processors.SequenceBiasLogitsProcessor) -> None:
    for sequence, bias in each.sequence_bias.items():
        if len(sequence) != 1:
            _refuse("a bias of several tokens in a row")
        choice.bias[sequence[0]] = float(bias)


def _repetition(choice: _Choice, each: processors.RepetitionPenaltyLogitsProcessor) -> None:
    choice.penalty = each.penalty
    choice.ignored = 0 if each.prompt_ignore_length is None else each.prompt_ignore_length


def _min_length(choice: _Choice, each: processors.MinLengthLogitsProcessor) -> None:
    _least(choice, each.min_length - choice.columns, each.eos_token_id)


def _min_new(choice: _Choice, each: processors.MinNewTokensLengthLogitsProcessor) -> None:
    least = each.prompt_length_to_skip + each.min_new_tokens - choice.columns
    _least(choice, least, each.eos_token_id)


def _least(choice: _Choice, least: int, stop_ids: torch.Tensor) -> None:
    choice.guarded.append(_ids(stop_ids))
    choice.least = max(choice.least, least)


def _temperature(choice: _Choice, each: processors.TemperatureLogitsWarper) -> None:
    choice.temperature = each.temperature


def _top_k(choice: _Choice, each: processors.TopKLogitsWarper) -> None:
    _check_filter(each)
    choice.top_k = each.top_k


def _top_p(choice: _Choice, each: processors.TopPLogitsWarper) -> None:
    _check_filter(each)
    choice.top_p = each.top_p


def _min_p(choice: _Choice, each: processors.MinPLogitsWarper) -> None:
    _check_filter(each)
    choice.min_p = each.min_p


def _check_filter(each: Any) -> None:
    if each.filter_value != -float("inf") or each.min_tokens_to_keep != 1:
        _refuse(f"{type(each).__name__} with settings of its own")


_WARPERS = 4
"""From this place on processors only matter where tokens are drawn."""
_PROCESSORS: dict[type, tuple[int, Callable[[_Choice, Any], None]]] = {
    processors.SequenceBiasLogitsProcessor: (0, _bias),
    processors.RepetitionPenaltyLogitsProcessor: (1, _repetition),
    processors.MinLengthLogitsProcessor: (2, _min_length),
    processors.MinNewTokensLengthLogitsProcessor: (3, _min_new),
    processors.TemperatureLogitsWarper: (4, _temperature),
    processors.TopKLogitsWarper: (5, _top_k),
    processors.TopPLogitsWarper: (6, _top_p),
    processors.MinPLogitsWarper: (7, _min_p),
}
_STOPS: dict[type, Callable[[_Choice, Any], None]] = {
    criteria.MaxLengthCriteria: _max_length,
    criteria.EosTokenCriteria: _stop_ids,
}


def _unknown(_: _Choice, each: object) -> None:
    _refuse(type(each).__name__)


def _refuse(what: str) -> NoReturn:
    raise unsupported(what)


def unsupported(what: str) -> Unsupported:
    """The error for what only the client head does."""
    return Unsupported(f"head='server' can't do {what}: leave the head to the client, or that out")


def _ids(ids: torch.Tensor) -> set[int]:
    listed: Sequence[int] = ids.reshape(-1).tolist()
    return set(listed)
