"""Tokens chosen by the servers: those of transformers, and those of the client head."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria
from transformers.generation.logits_process import LogitsProcessor

from bloombee.client.seeded_draws import SeededDraws
from bloombee.core import Span
from bloombee.errors import Unsupported
from bloombee.models import open_source
from tests.client_swarm import QUICK, ClientSwarm
from tests.generation import mixed, prompt, same_tokens
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW = 14


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ClientSwarm]]:
    """A tiny Llama on three stages."""
    path = tiny_model("llama", tmp_path_factory.mktemp("llama"))
    spans = [Span(0, 2), Span(2, 4), Span(4, 5)]
    with ClientSwarm(open_source(str(path)), spans) as swarm:
        yield reference(path), swarm


@pytest.fixture
def local(three: tuple[Any, ClientSwarm]) -> Any:
    return three[0]


@pytest.fixture
def swarm(three: tuple[Any, ClientSwarm]) -> Iterator[ClientSwarm]:
    free = three[1].free_tokens()
    yield three[1]
    assert three[1].free_tokens() == free, "a test left KV on the servers"


@pytest.fixture
def remote(swarm: ClientSwarm) -> Any:
    return swarm.model()


def parts(swarm: ClientSwarm, count: int | None, **changes: Any) -> Any:
    """A client that decodes in so many micro-batches."""
    return swarm.model(QUICK.model_copy(update={"micro_batches": count, **changes}))


def early(local: Any, ids: torch.Tensor, **arguments: Any) -> list[int]:
    """Stop ids with which rows end at different times."""
    free = local.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **arguments)
    new = free[:, ids.shape[1] :]
    return [int(new[row, 2 + 3 * (row % 3)]) for row in range(0, len(new), 2)]


def test_greedy_is_transformers(local: Any, remote: Any) -> None:
    same_tokens(local, remote, prompt(1, 1), max_new_tokens=NEW)
    found = remote.generate(prompt(3, 9), max_new_tokens=NEW, do_sample=False, head="server")
    assert found.tolist() == same_tokens(local, remote, prompt(3, 9), max_new_tokens=NEW).tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_rows_that_finish_early_in_any_number_of_micro_batches(
    local: Any, swarm: ClientSwarm, count: int
) -> None:
    ids, mask = mixed([3, 11, 7, 1, 20, 9, 4, 16, 5], "left", seed=count)
    ends = early(local, ids, attention_mask=mask)
    model = parts(swarm, count)
    found = same_tokens(
        local, model, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=ends
    )
    assert (found[:, ids.shape[1] :] == 0).any(), "no row ended early"
    assert len(model._shown) == count


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(local: Any, remote: Any, side: str) -> None:
    ids, mask = mixed([4, 13, 8], side)
    if side == "left":
        same_tokens(local, remote, ids, attention_mask=mask, max_new_tokens=NEW)
        return
    found = remote.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    for row, length in enumerate([4, 13, 8]):
        alone = local.generate(ids[row : row + 1, :length], max_new_tokens=NEW, do_sample=False)
        assert found[row, ids.shape[1] :].tolist() == alone[0, length:].tolist()


CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8, "top_k": 0},
    {"min_p": 0.1, "temperature": 1.7},
    {"repetition_penalty": 1.6, "min_new_tokens": 5},
    {"sequence_bias": {(7,): 4.0, (9,): -8.0}, "min_length": 16},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(choice) or "plain")
def test_seeded_sampling_is_the_same_wherever_it_happens(
    local: Any, swarm: ClientSwarm, choice: dict[str, Any]
) -> None:
    ids, mask = mixed([3, 11, 7, 1, 9], "left")
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": True,
        "pad_token_id": 0,
        "eos_token_id": early(local, ids, attention_mask=mask),
        **choice,
    }
    with SeededDraws(77):
        expected = local.generate(ids, **arguments).tolist()
    here = swarm.model().generate(ids, seed=77, head="client", **arguments)
    assert here.tolist() == expected
    for count in (1, 2, 5):
        there = parts(swarm, count).generate(ids, seed=77, head="server", **arguments)
        assert there.tolist() == expected, count


GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"min_new_tokens": 6},
    {"min_length": 15},
    {"sequence_bias": {(3,): 9.0}},
    {"repetition_penalty": 0.6, "sequence_bias": {(3,): 2.0}, "min_new_tokens": 4},
]


@pytest.mark.parametrize("choice", GREEDY, ids=lambda choice: "-".join(choice))
def test_processors_of_greedy_decoding(local: Any, remote: Any, choice: dict[str, Any]) -> None:
    ids, mask = mixed([4, 12, 9], "left")
    same_tokens(
        local,
        _ServerHead(remote),
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        eos_token_id=early(local, ids, attention_mask=mask),
        **choice,
    )


class _ServerHead:
    """The model with nothing but the server head."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, ids: torch.Tensor, **arguments: Any) -> Any:
        return self._model.generate(ids, head="server", **arguments)


def test_several_answers_to_one_prompt(local: Any, swarm: ClientSwarm) -> None:
    arguments: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "pad_token_id": 0}
    for columns, count in ((1, 1), (40, 1), (40, 2), (40, 3), (40, 8)):
        with SeededDraws(5):
            expected = local.generate(prompt(2, columns), max_new_tokens=8, **arguments)
        model = parts(swarm, count, reuse_prompts=False)
        found = model.generate(
            prompt(2, columns), max_new_tokens=8, seed=5, head="server", **arguments
        )
        assert found.tolist() == expected.tolist(), (columns, count)


def test_micro_batches_are_chosen_by_rows_and_stages(swarm: ClientSwarm) -> None:
    for rows, sessions in ((1, 1), (7, 1), (8, 2), (13, 3), (40, 4)):
        model = parts(swarm, None)
        model.generate(prompt(rows, 3), max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert len(model._shown) == sessions, rows


# Sessions of several turns ---------------------------------------------------------------


@pytest.mark.parametrize("head", ["server", "mixed"])
def test_turns_go_on_from_each_other(local: Any, remote: Any, head: str) -> None:
    luck = random.Random(4)
    text, mask = mixed([5, 9, 3], "left")
    with remote.inference_session(max_length=300, batch_size=3) as session:
        for turn in range(5):
            arguments: dict[str, Any] = {
                "attention_mask": mask,
                "max_new_tokens": 10,
                "do_sample": False,
                "pad_token_id": 0,
                "eos_token_id": early(local, text, attention_mask=mask)[:1],
            }
            heads = ("server", "client") if head == "mixed" else ("server",)
            expected = local.generate(text, **arguments)
            found = remote.generate(text, head=heads[turn % len(heads)], **arguments)
            assert found.tolist() == expected.tolist(), turn
            assert session.position < found.shape[1]
            pads = found[:, text.shape[1] :] != 0
            new = prompt(3, luck.randint(1, 6), seed=turn)
            text = torch.cat((found, new), 1)
            mask = torch.cat((mask, pads.long(), torch.ones_like(new)), 1)


def test_a_session_sends_only_what_is_new(local: Any, remote: Any) -> None:
    text = prompt(2, 30)
    with remote.inference_session(max_length=200, batch_size=2) as session:
        for turn in range(3):
            arguments: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
            expected = local.generate(text, do_sample=False, **arguments)
            found = remote.generate(text, do_sample=False, head="server", **arguments)
            assert found.tolist() == expected.tolist()
            assert session.position == found.shape[1] - 1
            text = torch.cat((found, prompt(2, 4, seed=turn)), 1)


# Streams ---------------------------------------------------------------------------------


class _Heard:
    def __init__(self) -> None:
        self.told: list[list[Any]] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.told.append(tokens.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers_hear_what_transformers_tells_them(local: Any, swarm: ClientSwarm) -> None:
    ids = prompt(6, 5)
    arguments: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": early(local, ids),
    }
    there, here = _Heard(), _Heard()
    local.generate(ids, streamer=there, **arguments)
    parts(swarm, 3).generate(ids, streamer=here, head="server", **arguments)
    assert here.told == there.told
    assert here.ended == there.ended == 1


# What stays with the client ----------------------------------------------------------------


class _Odd(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.arange(scores.shape[-1]) % 2


CLIENTS: list[tuple[dict[str, Any], str]] = [
    ({"do_sample": True}, "sampling without seed="),
    ({"logits_processor": LogitsProcessorList([_Odd()])}, "_Odd"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    ({"sequence_bias": {(3, 4): 5.0}}, "several tokens"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ({"use_cache": False}, "use_cache=False"),
    ({"renormalize_logits": True}, "LogitNormalization"),
    (
        {"stopping_criteria": StoppingCriteriaList([stopping_criteria.MaxTimeCriteria(99.0)])},
        "MaxTimeCriteria",
    ),
]


@pytest.mark.parametrize(("arguments", "reason"), CLIENTS, ids=lambda value: str(value)[:20])
def test_what_only_transformers_does_is_left_to_it_or_refused(
    local: Any, remote: Any, arguments: dict[str, Any], reason: str
) -> None:
    ids, common = prompt(2, 6), {"max_new_tokens": 6, "pad_token_id": 0}
    with pytest.raises(Unsupported, match=reason):
        remote.generate(ids, head="server", **({"do_sample": False} | common | arguments))
    if not arguments.get("do_sample"):
        made: Any = remote.generate(ids, do_sample=False, **common, **arguments)
        expected: Any = local.generate(ids, do_sample=False, **common, **arguments)
        if "return_dict_in_generate" in arguments:
            made.cache.close()
            made, expected = made.sequences, expected.sequences
        assert made.tolist() == expected.tolist()


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "seed"])
@pytest.mark.parametrize("several", [1, 3])
def test_a_dict_of_sequences_comes_with_a_cache_to_go_on_from(
    local: Any, remote: Any, arguments: dict[str, Any], several: int
) -> None:
    ids, mask = mixed([3, 7], "left")
    common = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, **arguments}
    common |= {"num_return_sequences": several} if arguments else {}
    made: Any = remote.generate(
        ids, attention_mask=mask, head="server", return_dict_in_generate=True, **common
    )
    plain = remote.generate(ids, attention_mask=mask, head="client", **common)
    assert made.sequences.tolist() == plain.tolist()
    assert made.scores is None
    assert made.cache.get_seq_length() == made.sequences.shape[1] - 1
    sent = made.cache.batch.session.traffic.bytes_sent
    longer = torch.cat((made.sequences, prompt(len(plain), 2, seed=8)), dim=1)
    rows = len(plain) // len(mask)
    wider = torch.cat((mask.repeat_interleave(rows, 0), torch.ones(len(plain), 7)), 1).long()
    again = {"attention_mask": wider, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = remote.generate(longer, cache=made.cache, **again)
    assert found.tolist() == local.generate(longer, **again).tolist()
    assert made.cache.batch.session.traffic.bytes_sent - sent < 2000
    made.cache.close()


# The paper's scheme --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, 1, 3, 7])
def test_micro_batches_with_a_barrier(local: Any, swarm: ClientSwarm, count: int | None) -> None:
    ids, mask = mixed([3, 11, 7, 5, 6], "left")
    model = parts(swarm, count, barrier=True)
    same_tokens(local, model, ids, attention_mask=mask, max_new_tokens=NEW)
    with pytest.raises(Unsupported, match="no barrier"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, head="server", do_sample=False)
