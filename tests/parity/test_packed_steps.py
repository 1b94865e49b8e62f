"""A packed step: no sequence changes another, trees equal their paths, errors undo."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.core import PackedTable, Span
from bloombee.errors import RequestError
from bloombee.kv import BatchItem
from bloombee.models import open_source
from tests.pipeline import Pipeline
from tests.tiny import FAMILIES, VOCABULARY, WINDOW, reference, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.core import SessionId

# Two roots; the first has two children, one of them a child of its own.
TREE = (-1, 0, 0, 2, -1, 4)
PATHS = ((0, 1), (0, 2, 3), (4, 5))
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def tokens(count: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, VOCABULARY) for _ in range(count)]


def row(
    session: SessionId, first: int, count: int, parents: tuple[int, ...] | None = None
) -> BatchItem:
    return BatchItem(session, PackedTable((0,), (first,), (count,), parents))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_equals_each_of_its_paths(family: str, tmp_path: Path) -> None:
    pipeline = Pipeline(open_source(str(tiny_model(family, tmp_path))), 2)
    held = WINDOW + 5
    prompt, draft = tokens(held, 1), tokens(len(TREE), 2)
    session = pipeline.open(1, 64)
    pipeline.prefill(session, [prompt])
    tree = pipeline.step([row(session, held, len(TREE), TREE)], draft)
    for path in PATHS:
        pipeline.truncate(session, 0, held)
        chain = pipeline.step([row(session, held, len(path))], [draft[node] for node in path])
        assert (tree[list(path)] - chain).abs().max() < 1e-5


def test_clients_in_one_step_get_what_they_get_alone(tmp_path: Path) -> None:
    pipeline = Pipeline(open_source(str(tiny_model("llama", tmp_path))), 2)
    prompts = [tokens(length, length) for length in (33, 1, 12)]
    alone = []
    for prompt in prompts:
        session = pipeline.open(1, 64)
        logits = pipeline.prefill(session, [prompt])
        alone.append(torch.cat([logits, pipeline.step([row(session, len(prompt), 1)], [9])]))
    sessions = [pipeline.open(1, 64) for _ in prompts]
    first = pipeline.step([row(sessions[0], 0, 33)], prompts[0])
    both = pipeline.step(
        [row(sessions[1], 0, 1), row(sessions[0], 33, 1), row(sessions[2], 0, 12)],
        [*prompts[1], 9, *prompts[2]],
    )
    assert torch.equal(torch.cat([first, both[1:2]]), alone[0])
    assert torch.equal(both[:1], alone[1][:1])
    assert torch.equal(both[2:], alone[2][:12])


def test_a_neighbours_long_prompt_changes_no_bit_under_dynamic_rotary(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}
    path = tiny_model("llama", tmp_path, **settings)
    source = open_source(str(path))
    assert source.max_length == 128
    pipeline = Pipeline(source, 1)
    short, long = tokens(10, 1), tokens(70, 2)
    session = pipeline.open(1, 100)
    alone = pipeline.prefill(session, [short])
    together = pipeline.open(2, 100)
    both = pipeline.prefill(together, [short, long])
    assert torch.equal(both[:10], alone)
    for prompt, logits in ((short, both[:10]), (long, both[10:])):
        with torch.inference_mode():
            wanted = reference(path)(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() < 1e-4


def test_a_step_that_fails_leaves_the_pool_as_it_was(tmp_path: Path) -> None:
    pipeline = Pipeline(open_source(str(tiny_model("llama", tmp_path))), 1)
    (model,), (pool,) = pipeline.models, pipeline.pools
    session = pipeline.open(1, 64)
    pipeline.prefill(session, [tokens(9, 0)])
    rows = torch.zeros(2, model.hidden_size)
    with pytest.raises(RequestError):
        model.forward(rows, [row(session, 4, 2)], pool)
    with pytest.raises(RuntimeError):
        model.forward(rows[:, :-1], [row(session, 9, 2)], pool)
    assert pool.lengths(session) == (9,)
    pool.check_integrity()
    model.forward(rows, [row(session, 9, 2)], pool)
    assert pool.lengths(session) == (11,)
    assert model.span == Span(0, 5)
