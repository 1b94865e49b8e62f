"""Sessions that begin alike: what one computed, all stages of the next one begin with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.core import PackedTable
from bloombee.server.keeping import Copy
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.generation import mixed, prompt
from tests.swarm.beginning import LONG, SHARED, C, adopted, begins, forget, kept, longer, saved
from tests.swarm.disturbed import GREEDY, THREE, all_free, same

if TYPE_CHECKING:
    from bloombee.models import ModelSource
    from bloombee.server.stage import StageServer


@pytest.mark.parametrize("count", [C - 7, C - 6, C, 2 * C + 30])
def test_a_second_session_begins_on_every_stage(three: ClientSwarm, local: Any, count: int) -> None:
    model = three.model()
    same(local, model, begins(count))
    assert sum(adopted(model)) == 0
    kept(three, *[(count + 7) // C] * 3)
    same(local, model, begins(count, seed=1))
    assert sum(adopted(model)) == count // C * C
    assert saved(three) == [count // C * C] * 3
    same(local, model, begins(count))  # the same prompt again: all but its last token may be held
    assert sum(adopted(model)) == (count + 6) // C * C
    all_free(three)


def test_it_is_the_same_bits(three: ClientSwarm) -> None:
    """KV and journal of a session that adopted are those of the session that computed."""
    model: Any = three.model()
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        with model.inference_session(max_length=300):
            model.generate(begins(2 * C), max_new_tokens=1, **GREEDY)
            kept(three, 2, 2, 2)
            found.append([part for stage in three.stages for part in _held(three, stage, 2 * C)])
    assert adopted(model) == [2 * C]
    assert len(found[0]) == 3 * 2 + 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _held(swarm: ClientSwarm, stage: StageServer, count: int) -> list[torch.Tensor]:
    """What the one session of a stage holds of its first tokens."""
    (session,) = stage.sessions
    journal = session.held.journal
    copy = Copy(stage._parts.pool.shape, stage.offer.span, 0, range(count // C))
    while not copy.is_whole:
        swarm.loop.run(stage.executor.call(partial(copy.advance, session.id)))
    rows = [] if journal is None else [journal.rows(PackedTable((0,), (0,), (count,)))]
    return [*copy.kv, *rows]


# Whose they are ---------------------------------------------------------------------------------


def test_other_clients_find_nothing(three: ClientSwarm, local: Any, warm: Any) -> None:
    other = three.model()
    same(local, other, begins(LONG))
    assert adopted(other) == [0]
    kept(three, 6, 6, 6)
    same(local, warm, begins(LONG, seed=2))
    assert adopted(warm) == [LONG]


def test_clients_share_where_the_operator_says_so(source: ModelSource, local: Any) -> None:
    with ClientSwarm(source, THREE, Size(kv_tokens=4096, share_prefixes=True)) as swarm:
        same(local, swarm.model(), begins(LONG))
        kept(swarm, 3, 3, 3)
        other = swarm.model()
        same(local, other, begins(LONG, seed=1))
        assert adopted(other) == [LONG]


def test_a_client_may_do_without(three: ClientSwarm, local: Any) -> None:
    model = three.model(QUICK.model_copy(update={"reuse_prompts": False}))
    for seed in range(2):
        same(local, model, begins(LONG, seed=seed))
    assert adopted(model) == []
    kept(three, 0, 0, 0)


def test_a_server_may_keep_none(source: ModelSource, local: Any) -> None:
    with ClientSwarm(source, THREE, Size(kv_tokens=4096, prefix_bytes=0)) as swarm:
        model = swarm.model()
        for seed in range(2):
            same(local, model, begins(LONG, seed=seed))
            assert adopted(model) == [0]
        kept(swarm, 0, 0, 0)


# What stages hold differs -----------------------------------------------------------------------


@pytest.mark.parametrize(("index", "lost"), [(0, 1), (1, 3), (2, 2)])
def test_a_stage_that_lost_some_lowers_what_all_begin_with(
    three: ClientSwarm, local: Any, warm: Any, index: int, lost: int
) -> None:
    forget(three, three.stages[index], lost)
    same(local, warm, begins(LONG, seed=1))
    assert adopted(warm) == [(3 - lost) * C]
    kept(three, 3, 3, 3)  # the others had them, and it has them again
    same(local, warm, begins(LONG, seed=2))
    assert adopted(warm) == [LONG]
    all_free(three)


def test_a_server_that_started_again_holds_nothing(
    three: ClientSwarm, local: Any, warm: Any
) -> None:
    doomed = three.stages[1]
    three.now(lambda: three.kill(doomed))
    three.restart(doomed)
    same(local, warm, begins(LONG, seed=1))
    assert adopted(warm) == [0]
    kept(three, 3, 3, 3)
    same(local, warm, begins(LONG, seed=2))
    assert adopted(warm) == [LONG]


# Kinds of generation ----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_begins_with_it_from_its_second_call_on(
    three: ClientSwarm, local: Any, side: str
) -> None:
    lengths = [LONG + 5, C + 9, 5, 2 * C + 1]
    if side == "right":
        lengths = [LONG + 5] * 4
    ids, mask = mixed(lengths, "left")
    for row, length in enumerate(lengths):
        head = min(length - 1, LONG)
        ids[row, ids.shape[1] - length :][:head] = SHARED[0, :head]
    model = three.model()
    same(local, model, ids, attention_mask=mask)
    assert adopted(model) == [0] * 4
    kept(three, 3, 3, 3)
    ids[:, -1] = prompt(4, 1, 5)[:, 0]
    same(local, model, ids, attention_mask=mask)
    assert adopted(model) == [(length - 1) // C * C for length in lengths]
    all_free(three)


@pytest.mark.parametrize(
    "arguments",
    [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}],
    ids=["beams", "several"],
)
def test_beams_begin_with_it(
    three: ClientSwarm, local: Any, warm: Any, arguments: dict[str, Any]
) -> None:
    same(local, warm, begins(LONG, seed=1), **arguments)
    assert sum(adopted(warm)) == LONG
    all_free(three)


def test_turns_of_a_session(three: ClientSwarm, local: Any, warm: Any) -> None:
    with warm.inference_session(max_length=400):
        text = begins(2 * C, seed=3)
        for turn in range(3):
            same(local, warm, text)
            assert adopted(warm) == [2 * C]
            text = longer(local, text, prompt(1, 70, turn))
    all_free(three)


def test_a_prompt_of_many_steps(three: ClientSwarm, local: Any, warm: Any) -> None:
    ids = torch.cat((SHARED, prompt(1, 500, 7)), 1)
    same(local, warm, ids, max_new_tokens=3)
    assert adopted(warm) == [LONG]
    kept(three, *[(LONG + 500) // C] * 3)
    same(local, warm, ids, max_new_tokens=3)
    assert adopted(warm) == [(LONG + 499) // C * C]


def test_calls_that_want_all_rows_or_bring_no_ids_do_not_ask(
    three: ClientSwarm, local: Any, warm: Any
) -> None:
    ids = begins(LONG)
    logits = warm(ids).logits
    assert adopted(warm) == []
    torch.testing.assert_close(logits, local(ids).logits, atol=1e-4, rtol=1e-4)
    embeds = local.get_input_embeddings()(ids).detach()
    expected = local.generate(inputs_embeds=embeds, max_new_tokens=3, **GREEDY)
    found = warm.generate(inputs_embeds=embeds, max_new_tokens=3, **GREEDY)
    assert found.tolist() == expected.tolist()
    assert adopted(warm) == []
