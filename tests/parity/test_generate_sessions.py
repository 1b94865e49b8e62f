"""Several turns, `forward`, and several clients, over stages in memory."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.client.seeded_draws import SeededDraws
from bloombee.core import Span
from bloombee.errors import RequestError
from bloombee.models import open_source
from tests.client_swarm import ClientSwarm
from tests.generation import mixed, prompt, same_tokens
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}

# Several turns ---------------------------------------------------------------------------


def test_a_returned_cache_is_continued(local: Any, remote: Any) -> None:
    ids = prompt(2, 6)
    arguments: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    first = remote.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **arguments)
    assert first.cache.get_seq_length() == 10
    longer = torch.cat((first.sequences, prompt(2, 3, seed=8)), dim=1)
    second = remote.generate(longer, cache=first.cache, max_new_tokens=30, **arguments)
    expected = local.generate(longer, max_new_tokens=30, **arguments)
    assert second.tolist() == expected.tolist()
    first.cache.close()


def test_turns_of_a_session_send_only_what_is_new(
    local: Any, remote: Any, swarm: ClientSwarm
) -> None:
    id_bytes, other_bytes = 4, 2500
    text = prompt(1, 1200)
    with remote.inference_session(max_length=1400) as session:
        for turn in range(3):
            before = session.cache.batch.session.traffic.bytes_sent if turn else 0
            expected = local.generate(text, max_new_tokens=6, do_sample=False, eos_token_id=None)
            found = remote.generate(text, max_new_tokens=6, do_sample=False, eos_token_id=None)
            assert found.tolist() == expected.tolist()
            assert session.position == found.shape[1] - 1
            sent = session.cache.batch.session.traffic.bytes_sent - before
            fresh = text.shape[1] if not turn else 15 + 1
            assert fresh * id_bytes <= sent < fresh * id_bytes + other_bytes
            text = torch.cat((found, prompt(1, 15, seed=turn)), dim=1)
        assert session.route is not None
        assert session.max_length == 1400


def test_a_session_goes_back(local: Any, remote: Any) -> None:
    text = prompt(1, 20)
    with remote.inference_session(max_length=64) as session:
        remote.generate(text, max_new_tokens=10, do_sample=False, eos_token_id=None)
        session.position = 12
        other = torch.cat((text[:, :12], prompt(1, 5, seed=4)), dim=1)
        same_tokens(local, remote, other, max_new_tokens=8, eos_token_id=None)
        changed = other.clone()
        changed[0, 5] = 7  # earlier than what is held: found without being told
        same_tokens(local, remote, changed, max_new_tokens=8, eos_token_id=None)


def test_forward_in_a_session_goes_on_from_its_position(local: Any, remote: Any) -> None:
    ids = prompt(2, 30)
    with torch.no_grad():
        expected = local(ids).logits
    with remote.inference_session(max_length=64, batch_size=2) as session:
        cuts = (0, 11, 12, 13, 25, 30)
        for start, stop in itertools.pairwise(cuts):
            logits = remote(ids[:, start:stop]).logits
            assert (logits - expected[:, start:stop]).abs().max() < 1e-4
        session.position = 12
        assert (remote(ids[:, 12:]).logits - expected[:, 12:]).abs().max() < 1e-4


def test_a_padded_session_goes_on(local: Any, remote: Any) -> None:
    ids, mask = mixed([4, 9], "left")
    with remote.inference_session(max_length=64, batch_size=2):
        first = remote.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        longer = torch.cat((first, prompt(2, 3, seed=2)), dim=1)
        mask = torch.cat((mask, torch.ones(2, 8, dtype=torch.long)), dim=1)
        same_tokens(local, remote, longer, attention_mask=mask, max_new_tokens=5, eos_token_id=None)


def test_a_right_padded_session_goes_back_and_on(local: Any, remote: Any) -> None:
    """The shorter row ends before the place where the longer one changes."""
    ids, mask = mixed([4, 9], "right")
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, **GREEDY}
    with remote.inference_session(max_length=64, batch_size=2):
        remote.generate(ids, **arguments)
        changed = ids.clone()
        changed[1, 8] = 77
        found = remote.generate(changed, **arguments)
    for row, length in ((0, 4), (1, 9)):
        alone = local.generate(changed[row : row + 1, :length], max_new_tokens=5, **GREEDY)
        assert found[row, 9:].tolist() == alone[0, length:].tolist()


def test_a_row_whose_result_is_gone_is_refused(remote: Any) -> None:
    with remote.inference_session(max_length=64, batch_size=2):
        remote(prompt(2, 5))
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, 5:] = 0
        with pytest.raises(RequestError, match="row 1 has no unmasked token in this step"):
            remote(prompt(2, 2), attention_mask=mask)


# forward ----------------------------------------------------------------------------------


def test_forward_returns_logits_states_and_loss(local: Any, remote: Any) -> None:
    ids = prompt(2, 9)
    with torch.no_grad():
        expected = local(ids, labels=ids, output_hidden_states=True)
    found = remote(ids, labels=ids, output_hidden_states=True)
    assert (found.logits - expected.logits).abs().max() < 1e-4
    assert (found.hidden_states[-1] - expected.hidden_states[-1]).abs().max() < 1e-4
    assert abs(float(found.loss) - float(expected.loss)) < 1e-4
    assert found.cache is None


@pytest.mark.parametrize("keep", [1, 4, 0, torch.tensor([0, 5])], ids=["1", "4", "all", "these"])
def test_forward_keeps_the_logits_asked_for(local: Any, remote: Any, keep: Any) -> None:
    ids = prompt(2, 9)
    with torch.no_grad():
        expected = local(ids, logits_to_keep=keep).logits
    found = remote(ids, logits_to_keep=keep).logits
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4


def test_forward_of_embeddings_and_as_a_tuple(local: Any, remote: Any) -> None:
    ids = prompt(2, 9)
    embeds = local.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        expected = local(inputs_embeds=embeds).logits
    (found,) = remote(inputs_embeds=embeds, return_dict=False)
    assert (found - expected).abs().max() < 1e-4


def test_generate_from_embeddings(local: Any, remote: Any) -> None:
    embeds = local.get_input_embeddings()(prompt(1, 9)).detach()
    expected = local.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False)
    embeds = remote.get_input_embeddings()(prompt(1, 9))
    found = remote.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False)
    assert found.tolist() == expected.tolist()


def test_bfloat16_is_as_near_to_exact_as_local(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    spans = [Span(0, 3), Span(3, 5)]
    ids, mask = mixed([9, 30, 1], "left")
    exact, local = reference(path), reference(path, dtype=torch.bfloat16)
    with ClientSwarm(open_source(str(path)), spans, dtype=torch.bfloat16) as swarm:
        found = swarm.model()(ids, attention_mask=mask).logits
    with torch.no_grad():
        expected, near = (m(ids, attention_mask=mask).logits for m in (exact, local))
    assert found.dtype is torch.bfloat16

    def error(logits: torch.Tensor) -> float:
        return float((logits.float() - expected)[mask.bool()].square().mean().sqrt())

    assert error(found) < 1.3 * error(near)


# Company -------------------------------------------------------------------------------------


def test_three_clients_at_once_each_get_their_own_answer(local: Any, swarm: ClientSwarm) -> None:
    found: dict[int, list[list[int]]] = {}

    def ask(client: int) -> None:
        model = swarm.model()
        for turn in range(3):
            ids = prompt(1 + client, 5 + 9 * turn, seed=client)
            made = model.generate(ids, do_sample=True, seed=client, max_new_tokens=12)
            found.setdefault(client, []).append(made.flatten().tolist())

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for client in range(3):
        for turn in range(3):
            ids = prompt(1 + client, 5 + 9 * turn, seed=client)
            with SeededDraws(client):
                expected = local.generate(ids, do_sample=True, max_new_tokens=12)
            assert found[client][turn] == expected.flatten().tolist()
