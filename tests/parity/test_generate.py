"""`generate` and `forward` over stages in memory give what transformers gives on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from bloombee.client.seeded_draws import SeededDraws
from bloombee.core import Span
from bloombee.errors import RequestError
from bloombee.models import open_source
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.generation import mixed, prompt, same_tokens
from tests.tiny import BLOCKS, FAMILIES, reference, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

STAGES = {1: ["0:5"], 2: ["0:3", "3:5"], 4: ["0:1", "1:2", "2:4", "4:5"]}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tiny_model(request.param, tmp_path_factory.mktemp("models"))
    return reference(path), open_source(str(path))


# Every family, every cut -------------------------------------------------------------


@pytest.mark.parametrize("stages", STAGES)
def test_every_family_over_every_cut(family: Any, stages: int) -> None:
    local, source = family
    with ClientSwarm(source, [Span.parse(text) for text in STAGES[stages]]) as swarm:
        remote = swarm.model()
        ids, mask = mixed([9, 1, 24, 5, 17, 2, 13], "left")
        with torch.no_grad():
            expected = local(ids, attention_mask=mask, position_ids=counted(mask)).logits
        logits = remote(ids, attention_mask=mask).logits
        assert (logits - expected)[mask.bool()].abs().max() < 1e-4
        same_tokens(local, remote, ids, attention_mask=mask, max_new_tokens=12)
        same_tokens(local, remote, prompt(1, 1), max_new_tokens=20)
        same_tokens(local, remote, prompt(2, 30), max_new_tokens=8, num_beams=3)
        embeds = local.get_input_embeddings()(ids).detach()
        found = remote(inputs_embeds=embeds, attention_mask=mask).logits
        assert (found - logits)[mask.bool()].abs().max() < 1e-5
        assert remote.route is not None
        assert [str(stage.span) for stage in remote.route.stages] == STAGES[stages]


def counted(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


# Shapes of batches ---------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "columns"), [(1, 1), (1, 600), (7, 40), (32, 16)])
def test_greedy(local: Any, remote: Any, batch: int, columns: int) -> None:
    same_tokens(local, remote, prompt(batch, columns), max_new_tokens=10)


def test_a_long_prompt_in_many_steps_gives_the_logits_of_one(local: Any, remote: Any) -> None:
    ids = prompt(1, 1500)
    with torch.no_grad():
        expected = local(ids).logits
    assert (remote(ids).logits - expected).abs().max() < 1e-4
    same_tokens(local, remote, ids, max_new_tokens=6)


def test_right_padded_rows_equal_their_own_unpadded_runs(local: Any, remote: Any) -> None:
    lengths = [9, 1, 24, 5, 17, 2, 13]
    ids, mask = mixed(lengths, "right")
    found = remote.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    for row, length in enumerate(lengths):
        alone = local.generate(
            ids[row : row + 1, :length], max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert found[row, ids.shape[1] :].tolist() == alone[0, length:].tolist()
        assert found[row, :length].tolist() == ids[row, :length].tolist()


def test_right_padding_is_not_warned_of(remote: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = mixed([3, 5], "right")
    remote.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert "right-padding" not in caplog.text


def test_a_mask_with_holes(local: Any, remote: Any) -> None:
    ids = prompt(3, 20)
    mask = torch.ones_like(ids)
    mask[0, 4:9] = 0
    mask[1, 0:3] = 0
    mask[1, 15] = 0
    same_tokens(local, remote, ids, attention_mask=mask, max_new_tokens=10)


def test_padding_without_a_mask_is_found_as_transformers_finds_it(local: Any, remote: Any) -> None:
    ids, _ = mixed([4, 9], "left")
    same_tokens(local, remote, ids, max_new_tokens=8)


def test_transformers_own_chunks_with_padding(local: Any, remote: Any) -> None:
    """Its chunks leave rows without any token in a step, at either end."""
    for side in ("left", "right"):
        ids, mask = mixed([3, 20, 11], side)
        arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        whole = remote.generate(ids, **arguments, pad_token_id=0)
        chunked = remote.generate(ids, **arguments, pad_token_id=0, prefill_chunk_size=4)
        assert whole.tolist() == chunked.tolist()


# Ways to choose tokens -----------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.8}])
def test_a_seed_draws_what_local_draws_with_its_generator(
    local: Any, remote: Any, arguments: dict[str, Any]
) -> None:
    ids = prompt(3, 6)
    with SeededDraws(11):
        expected = local.generate(ids, do_sample=True, max_new_tokens=15, **arguments)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = remote.generate(ids, do_sample=True, max_new_tokens=15, seed=11, **arguments)
    assert found.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), before), "the global generator was touched"


def test_sampling_without_a_seed_follows_the_global_generator(local: Any, remote: Any) -> None:
    ids = prompt(2, 6)
    torch.manual_seed(3)
    expected = local.generate(ids, do_sample=True, max_new_tokens=15)
    torch.manual_seed(3)
    assert remote.generate(ids, do_sample=True, max_new_tokens=15).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 3, "num_return_sequences": 3},
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6},
        {"bad_words_ids": [[5], [17]]},
        {"prompt_lookup_num_tokens": 4},
        {"use_cache": False},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_the_ways_of_generate(local: Any, remote: Any, arguments: dict[str, Any]) -> None:
    batch = 1 if "prompt_lookup_num_tokens" in arguments else 2
    same_tokens(local, remote, prompt(batch, 12), max_new_tokens=12, **arguments)


def test_beams_of_padded_rows(local: Any, remote: Any) -> None:
    ids, mask = mixed([4, 11, 7], "left")
    same_tokens(local, remote, ids, attention_mask=mask, max_new_tokens=9, num_beams=3)


def test_beams_that_are_sampled(local: Any, remote: Any) -> None:
    with SeededDraws(2):
        expected = local.generate(prompt(2, 5), num_beams=3, do_sample=True, max_new_tokens=8)
    found = remote.generate(prompt(2, 5), num_beams=3, do_sample=True, max_new_tokens=8, seed=2)
    assert found.tolist() == expected.tolist()


def test_several_sampled_answers_to_one_prompt(local: Any, remote: Any) -> None:
    arguments: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4}
    with SeededDraws(9):
        expected = local.generate(prompt(2, 5), max_new_tokens=8, **arguments)
    found = remote.generate(prompt(2, 5), max_new_tokens=8, seed=9, **arguments)
    assert found.tolist() == expected.tolist()


def test_a_shared_prompt_is_computed_once(swarm: ClientSwarm, remote: Any) -> None:
    """Ten answers to one prompt of 300 tokens send it once, not ten times."""

    def sent(answers: int) -> int:
        made = remote.generate(
            prompt(1, 300),
            do_sample=True,
            num_return_sequences=answers,
            max_new_tokens=2,
            seed=0,
            return_dict_in_generate=True,
        )
        session = made.cache.batch.session
        made.cache.close()
        return session.traffic.bytes_sent

    one, ten = sent(1), sent(10)
    prompt_bytes = 4 * 300  # of ids
    assert one > prompt_bytes
    assert ten - one < 3 * prompt_bytes


def test_an_assistant_model(local: Any, remote: Any) -> None:
    ids = prompt(1, 10)
    expected = local.generate(ids, do_sample=False, max_new_tokens=12)
    found = remote.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=local)
    assert found.tolist() == expected.tolist()


def test_own_processors_criteria_and_streamers(local: Any, remote: Any) -> None:
    class Shift(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + (torch.arange(scores.shape[1]) % 7 == input_ids.shape[1] % 7) * 3.0

    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 14)

    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Collect()
    arguments: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([Shift()]),
        "stopping_criteria": StoppingCriteriaList([After()]),
    }
    found = same_tokens(local, remote, prompt(1, 6), max_new_tokens=30, **arguments)
    assert found.shape[1] == 14
    remote.generate(
        prompt(1, 6), max_new_tokens=30, do_sample=False, streamer=streamer, **arguments
    )
    assert streamer.tokens == [*found[0].tolist(), -1]


def test_scores_logits_and_hidden_states(local: Any, remote: Any) -> None:
    arguments: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "do_sample": False,
        "max_new_tokens": 4,
    }
    expected = local.generate(prompt(2, 6), **arguments)
    found = remote.generate(prompt(2, 6), **arguments)
    for name in ("scores", "logits"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        assert all((a - b).abs().max() < 1e-4 for a, b in pairs)
    pairs = zip(found.hidden_states, expected.hidden_states, strict=True)
    assert all((a[-1] - b[-1]).abs().max() < 1e-4 for a, b in pairs)
    found.cache.close()


def test_the_tiny_models_are_cut_as_named() -> None:
    assert all(spans[-1].endswith(f":{BLOCKS}") for spans in STAGES.values())


def test_a_long_prompt_is_not_cut_where_rotation_depends_on_its_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = tiny_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    source = open_source(str(path))
    spans = [Span.parse(text) for text in STAGES[2]]
    with ClientSwarm(source, spans, Size(pass_tokens=32)) as swarm:
        remote = swarm.model()
        same_tokens(reference(path), remote, prompt(1, 150), max_new_tokens=10)
    with (
        ClientSwarm(source, spans, Size(max_step_tokens=100)) as swarm,
        pytest.raises(RequestError, match="in one step, of at most 100"),
    ):
        swarm.model().generate(prompt(1, 150), max_new_tokens=1)


def test_compressed_on_every_hop(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    source = open_source(str(path))
    spans = [Span.parse(text) for text in STAGES[4]]
    sent: dict[str, Any] = {}
    for codec in ("raw", "split"):
        with ClientSwarm(source, spans, Size(codec=codec), dtype=torch.bfloat16) as swarm:
            remote = swarm.model(QUICK.model_copy(update={"codec": codec}))
            rows = remote.get_input_embeddings()(prompt(4, 100)).detach()  # not ids
            found: Any = remote.generate(inputs_embeds=rows, max_new_tokens=10, do_sample=False)
            assert remote.traffic is not None
            sent[codec] = remote.traffic.bytes_sent
            sent[f"{codec} tokens"] = found.tolist()
    assert sent["split tokens"] == sent["raw tokens"]
    assert sent["split"] < 0.9 * sent["raw"]
