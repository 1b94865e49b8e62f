"""Tokens are chosen as transformers' processors would have it, and by one documented generator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bloombee.errors import RequestError, StepFailed
from bloombee.models.sampling import Chooser, Chosen, choose, draw, gumbel
from bloombee.models.scores import processed
from bloombee.protocol.messages import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY = 3000
IDS = st.integers(0, VOCABULARY - 1)


def logits_of(seed: int, rows: int = 1, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


def chooser(**parameters: Any) -> Chooser:
    return Chooser.of(msgspec.structs.replace(Sampling(budget=100), **parameters), VOCABULARY)


def plainly(
    sampling: Sampling, context: Sequence[int], row: torch.Tensor, prompt: int
) -> torch.Tensor:
    """The scores `[V]` that transformers' own processors make of a row."""
    processors: list[Any] = []
    if sampling.logit_bias:
        bias = [[[token], more] for token, more in sampling.logit_bias]
        processors.append(SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.least and sampling.stop_ids:
        stops = torch.tensor(sampling.stop_ids)
        processors.append(MinLengthLogitsProcessor(prompt + sampling.least, stops))
    if sampling.temperature:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            processors.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor(context or [0])[None]
    return LogitsProcessorList(processors)(ids, row[None].clone())[0]  # type: ignore[reportArgumentType] - a plain tensor of ids


@settings(max_examples=250, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_scores_are_those_of_transformers(data: st.DataObject, seed: int) -> None:
    generated = data.draw(st.lists(IDS, max_size=6))
    prompt = data.draw(st.lists(IDS, min_size=1, max_size=6))
    context = [*prompt, *generated]
    sampling = Sampling(
        budget=10,
        drawn=len(generated),
        least=data.draw(st.sampled_from([0, 3])),
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 1, 40, VOCABULARY + 5])),
        top_p=data.draw(st.sampled_from([0.0, 1e-6, 0.5, 0.95, 0.9999, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=tuple(data.draw(st.dictionaries(IDS, st.floats(-20, 20), max_size=4)).items()),
        stop_ids=tuple(data.draw(st.sets(IDS, max_size=3))),
        context=packed(context),
    )
    row = logits_of(seed, spread=data.draw(st.sampled_from([0.01, 1.0, 4.0])))[0]
    if data.draw(st.booleans()):
        row = row.round()  # ties everywhere
    mine = processed(row, sampling, len(generated), list(dict.fromkeys(context)), {})
    theirs = plainly(sampling, context, row, len(prompt))
    assert torch.equal(mine, theirs)
    own = Chooser.of(sampling, VOCABULARY)
    (chosen,) = choose(row[None], [own])
    if sampling.temperature:
        chances = theirs.softmax(-1)[None]
        assert chosen.token == int(draw(chances, 0, [0], [len(generated)]))
    else:
        assert chosen.token == int(theirs.argmax())


@pytest.mark.parametrize("vocabulary", [49_152, 49_155])
def test_top_p_of_a_large_vocabulary(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for spread in (0.5, 2.0, 3.0, 5.0):
        row = torch.randn(vocabulary, generator=generator) * spread
        for top_p in (0.1, 0.5, 0.9, 0.95, 0.99):
            sampling = Sampling(budget=1, temperature=1.0, top_p=top_p)
            assert torch.equal(processed(row, sampling, 0, [], {}), plainly(sampling, [], row, 1))


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    row = torch.zeros(VOCABULARY)
    own = chooser(
        drawn=3,
        context=packed([7, 7, 5, 6, 5]),
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logprobs=1,
    )
    scores = processed(row, own.sampling, 3, list(own._seen), own._counts)
    assert scores[[5, 6, 7, 8]].tolist() == [-1.0, -0.75, 0.0, 0.0]
    (chosen,) = choose(row[None], [own])
    assert chosen.token == 0
    assert chosen.logprob == pytest.approx(-math.log(VOCABULARY))
    (chosen,) = choose(row[None], [own])
    assert chosen.token == 1  # the first now has its own penalty


def test_a_penalty_follows_what_is_chosen() -> None:
    row = torch.tensor([[0.0] * VOCABULARY])
    row[0, 4], row[0, 9] = 2.0, 1.9
    own = chooser(repetition_penalty=2.0, context=packed([1]))
    assert [choose(row, [own])[0].token for _ in range(3)] == [4, 9, 4]


class TestGenerator:
    def test_it_is_what_its_docstring_says(self) -> None:
        words = np.random.Philox(key=[11, 3], counter=[0, 5, 0, 0]).random_raw(VOCABULARY // 2)
        halves = [int(w) >> shift & 0xFFFFFFFF for w in words for shift in (0, 32)]
        wanted = [-math.log(-math.log((half + 0.5) / 2**32)) for half in halves]
        assert gumbel(11, 3, 5, VOCABULARY).tolist() == pytest.approx(wanted, rel=1e-12)
        assert gumbel(11, 3, 5, 7).tolist() == gumbel(11, 3, 5, VOCABULARY)[:7].tolist()

    def test_known_tokens(self) -> None:
        """These never change, or what a seed gave yesterday it gives no more."""
        chances = (torch.arange(1.0, 1001) / 1e5)[None]
        tokens = [int(draw(chances, 42, [stream], [n])) for stream in (0, 1) for n in range(4)]
        assert tokens == KNOWN

    def test_every_position_and_stream_has_its_own_noise(self) -> None:
        noises = {tuple(gumbel(*key, 4).tolist()) for key in KEYS}
        assert len(noises) == len(KEYS)

    def test_tokens_come_as_often_as_they_should(self) -> None:
        chances = torch.tensor([[0.5, 0.0, 0.3, 0.15, 0.05]])
        count = 4000
        tokens = draw(chances.expand(count, -1), 7, range(count), [3] * count)
        often = torch.bincount(tokens, minlength=5) / count
        assert often[1] == 0
        assert (often - chances[0]).abs().max() < 0.03

    @settings(max_examples=200, deadline=None)
    @given(
        seed=st.integers(0, (1 << 63) - 1),
        size=st.integers(1, 3000),
        spread=st.sampled_from([0.0, 1.0, 4.0, 40.0]),
        some=st.booleans(),
    )
    def test_it_is_the_largest_score_of_all(
        self, seed: int, size: int, spread: float, *, some: bool
    ) -> None:
        chances = (logits_of(seed)[:, :size] * spread).softmax(-1)
        if some:
            chances[0, torch.rand(size) < 0.9] = 0.0
            chances[0, seed % size] = 0.25
        scores = chances[0].double().log() + gumbel(seed, 1, 2, size)
        assert int(draw(chances, seed, [1], [2])) == int(scores.argmax())

    def test_rows_do_not_matter_to_each_other(self) -> None:
        rows = logits_of(3, 6).softmax(-1)
        together = draw(rows, 9, range(6), range(10, 16)).tolist()
        assert together == [int(draw(rows[n : n + 1], 9, [n], [10 + n])) for n in range(6)]

    @pytest.mark.parametrize("bad", [0.0, math.nan])
    def test_nothing_to_draw_from(self, bad: float) -> None:
        rows = torch.full((1, 5), bad)
        with pytest.raises(StepFailed, match="no token can be drawn"):
            draw(rows, 0, [0], [0])


KEYS = [(seed, stream, drawn) for seed in (0, 1 << 62) for stream in (0, 1) for drawn in (0, 1, 9)]
KNOWN = [993, 877, 794, 611, 983, 853, 914, 726]


@pytest.mark.parametrize("vocabulary", [211, 49_152, 49_155])
def test_a_client_head_draws_the_same_from_its_batch(vocabulary: int) -> None:
    """Processors and softmax over a batch, then `draw`, against the server's row by row."""
    rows = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    rows[3:] = rows[3:].round(decimals=1)
    processors: list[Any] = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(200)]
    processors += [TopPLogitsWarper(0.9), MinPLogitsWarper(0.01)]
    chances = LogitsProcessorList(processors)(torch.zeros(7, 1, dtype=torch.long), rows).softmax(-1)  # type: ignore[reportArgumentType] - a plain tensor of ids
    sampling = Sampling(budget=9, temperature=0.7, top_k=200, top_p=0.9, min_p=0.01, seed=5)
    choosers = [
        Chooser.of(msgspec.structs.replace(sampling, stream=n, drawn=3 * n), vocabulary)
        for n in range(7)
    ]
    tokens = [each.token for each in choose(rows, choosers)]
    assert tokens == draw(chances, 5, range(7), range(0, 21, 3)).tolist()


@pytest.mark.parametrize("mix", [{}, {"temperature": 0.8, "top_k": 30, "logprobs": 3}])
def test_a_batch_is_its_rows(mix: dict[str, Any]) -> None:
    rows = logits_of(5, 4)
    settings_of = [{}, mix | {"seed": 4}, {"logit_bias": ((3, 1.0),)}, mix | {"stream": 2}]
    together = choose(rows, [chooser(**each) for each in settings_of])
    alone = [choose(rows[n : n + 1], [chooser(**e)])[0] for n, e in enumerate(settings_of)]
    assert list(together) == alone


def test_the_first_of_equals() -> None:
    row = torch.zeros(2, VOCABULARY)
    row[:, [70, 1500]] = 1.0
    tokens = [each.token for each in choose(row, [chooser(), chooser(logit_bias=((3, -1.0),))])]
    assert tokens == [70, 70]


def test_where_a_sequence_ends() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 8] = 1
    own = chooser(budget=2, stop_ids=(9,))
    assert [choose(row, [own])[0].finished for _ in range(2)] == ["", "length"]
    assert (own.drawn, own.left) == (2, 0)
    own = chooser(budget=9, stop_ids=(8, 9), least=1)
    row[0, 3] = 0.5
    assert choose(row, [own]) == (Chosen(3),)
    assert choose(row, [own]) == (Chosen(8, finished="stop"),)


def test_log_probabilities_are_the_models_own() -> None:
    rows = logits_of(8, 2)
    own = chooser(logprobs=3, logit_bias=((5, 100.0),), temperature=0.1)
    (chosen,) = choose(rows[:1], [own])
    raw = rows[0].log_softmax(-1)
    assert chosen.token == 5
    assert chosen.logprob == float(raw[5])
    best = raw.topk(2)
    assert chosen.alternatives == tuple(
        zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )


class TestRubbish:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0}])
    def test_logits_that_are_no_numbers(self, bad: float, parameters: dict[str, Any]) -> None:
        rows = logits_of(1, 2)
        rows[1, 17] = bad
        both = [chooser(), chooser(**parameters)]
        with pytest.raises(StepFailed, match="not finite"):
            choose(rows, both)
        assert [own.drawn for own in both] == [0, 0]

    def test_no_token_is_left(self) -> None:
        own = chooser(stop_ids=(0,), least=5)
        with pytest.raises(StepFailed, match="no token is possible"):
            choose(torch.zeros(1, 1), [own])
        with pytest.raises(StepFailed, match="no token can be drawn"):
            choose(torch.zeros(1, 1), [chooser(stop_ids=(0,), least=5, temperature=1.0)])
        assert own.drawn == 0

    @pytest.mark.parametrize(
        ("parameters", "says"),
        [
            ({"temperature": -1.0}, "temperature -1.0"),
            ({"temperature": math.nan}, "temperature nan"),
            ({"top_p": 1.5}, "top_p 1.5 is not from 0.0 to 1.0"),
            ({"min_p": -0.5}, "min_p"),
            ({"presence_penalty": math.inf}, "presence_penalty"),
            ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
            ({"logit_bias": ((3, math.nan),)}, "bias of 3"),
            ({"logit_bias": ((VOCABULARY, 1.0),)}, f"id {VOCABULARY} is none"),
            ({"stop_ids": (VOCABULARY,)}, f"id {VOCABULARY} is none"),
            ({"context": packed([5, -1])}, "id -1 is none"),
            ({"context": b"abc"}, "no list of 4-byte ids"),
            ({"budget": 0}, "budget"),
            ({"drawn": 3, "frequency_penalty": 1.0}, "3 tokens were drawn"),
        ],
    )
    def test_parameters_that_make_no_sense(self, parameters: dict[str, Any], says: str) -> None:
        with pytest.raises(RequestError, match=says) as caught:
            chooser(**parameters)
        assert "\n" not in str(caught.value)
