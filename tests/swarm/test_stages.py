"""Stages over a tiny random Llama compute what one stage does, and what transformers does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from bloombee.core import Span
from bloombee.models import ModelEnds, ModelSource, open_source
from bloombee.protocol.messages import Operations
from tests.swarm.harness import RawSession, Swarm, stage_of, swarm
from tests.tiny import BLOCKS, reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

PROMPTS = ([5, 17, 99, 3, 42, 7, 11], [8, 150, 23], [60, 61, 62, 63, 64])
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def source(folder: Path) -> ModelSource:
    return open_source(str(folder))


@pytest.fixture(scope="module")
def local(folder: Path) -> PreTrainedModel:
    return reference(folder)


class Generator:
    """Greedy decoding by raw steps: embeds, sends, takes the head."""

    def __init__(self, session: RawSession, ends: ModelEnds) -> None:
        self.session = session
        self._ends = ends
        self.lengths: dict[int, int] = {}

    async def feed(
        self, tokens: dict[int, list[int]], operations: Operations | None = None, want: str = "last"
    ) -> torch.Tensor:
        """Logits after new tokens of some sequences: one row each, or of every token."""
        ids = torch.tensor([token for new in tokens.values() for token in new])
        table = {s: (self.lengths.get(s, 0), len(new)) for s, new in tokens.items()}
        rows = self._ends.embed(ids, ids)
        changes = {"operations": operations} if operations else {}
        out = await self.session.step(rows, table, want=want, **changes)
        for sequence, (first, count) in table.items():
            self.lengths[sequence] = first + count
        return self._ends.logits(self._ends.norm(out))

    async def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens after each prompt, all sequences in each step."""
        logits = await self.feed(dict(enumerate(prompts)))
        out: list[list[int]] = [[] for _ in prompts]
        for step in range(count):
            chosen = logits.argmax(-1).tolist()
            for sequence, token in enumerate(chosen):
                out[sequence].append(token)
            if step + 1 < count:
                logits = await self.feed({s: [token] for s, token in enumerate(chosen)})
        return out


def run(
    source: ModelSource,
    spans: Sequence[Span],
    test: Callable[[Swarm, ModelEnds], Awaitable[None]],
    pass_tokens: int = 512,
) -> None:
    async def main() -> None:
        setups = [stage_of(source, span, pass_tokens=pass_tokens) for span in spans]
        async with swarm(setups) as s:
            await test(s, ends)
            assert await s.free_tokens() == [4096] * len(spans)
            for stage in s.stages:
                await stage.executor.call(lambda pool: pool.check_integrity())

    ends = ModelEnds.load(source, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        asyncio.run(asyncio.wait_for(main(), 60))


def greedy(local: PreTrainedModel, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
    """What transformers generates."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(local(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


SPLITS = [
    [Span(0, BLOCKS)],
    [Span(0, 2), Span(2, BLOCKS)],
    [Span(0, 1), Span(1, 2), Span(2, 4), Span(4, BLOCKS)],
]


@pytest.mark.parametrize("spans", SPLITS, ids=lambda spans: f"{len(spans)} stages")
@pytest.mark.parametrize("pass_tokens", [512, 4])
def test_generates_what_transformers_does(
    source: ModelSource, local: PreTrainedModel, spans: list[Span], pass_tokens: int
) -> None:
    async def test(s: Swarm, ends: ModelEnds) -> None:
        session = await s.client().open(s.route(), sequences=len(PROMPTS))
        out = await Generator(session, ends).generate(PROMPTS, NEW_TOKENS)
        assert out == [greedy(local, prompt) for prompt in PROMPTS]
        await session.close()

    run(source, spans, test, pass_tokens)


def test_logits_equal_transformers(source: ModelSource, local: PreTrainedModel) -> None:
    async def test(s: Swarm, ends: ModelEnds) -> None:
        session = await s.client().open(s.route(), sequences=len(PROMPTS))
        logits = await Generator(session, ends).feed(dict(enumerate(PROMPTS)), want="all")
        expected = torch.cat([local(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        await session.close()

    run(source, SPLITS[1], test)


def test_three_clients_at_once_get_their_own_answers(
    source: ModelSource, local: PreTrainedModel
) -> None:
    async def test(s: Swarm, ends: ModelEnds) -> None:
        async def one(prompt: list[int]) -> list[int]:
            session = await s.client().open(s.route())
            (out,) = await Generator(session, ends).generate([prompt], NEW_TOKENS)
            await session.close()
            return out

        outs = await asyncio.gather(*(one(prompt) for prompt in PROMPTS))
        assert list(outs) == [greedy(local, prompt) for prompt in PROMPTS]

    run(source, SPLITS[1], test)


def test_parts_of_spans(source: ModelSource, local: PreTrainedModel) -> None:
    """Two servers of overlapping spans; the route uses a part of each."""

    async def test(s: Swarm, ends: ModelEnds) -> None:
        session = await s.client().open(s.route(Span(0, 3), Span(3, BLOCKS)))
        (out,) = await Generator(session, ends).generate([PROMPTS[0]], NEW_TOKENS)
        assert out == greedy(local, PROMPTS[0])
        await session.close()

    run(source, [Span(0, BLOCKS), Span(1, BLOCKS)], test)


def test_forks_truncates_and_releases(source: ModelSource, local: PreTrainedModel) -> None:
    async def test(s: Swarm, ends: ModelEnds) -> None:
        session = await s.client().open(s.route(), sequences=3)
        generator = Generator(session, ends)
        await generator.feed({0: PROMPTS[0], 1: PROMPTS[1]})
        # 1 and 2 become copies of 0, 1 without its last two tokens; then 1 and 0 change places.
        generator.lengths |= {1: 5, 2: 7}
        fork = Operations(forks=((1, 0), (2, 0)), truncates=((1, 5),))
        logits = await generator.feed({1: [9], 2: [12]}, fork)
        expected = [[*PROMPTS[0][:5], 9], [*PROMPTS[0], 12]]
        assert logits.argmax(-1).tolist() == [greedy(local, ids, 1)[0] for ids in expected]
        generator.lengths |= {0: 6, 1: 7}
        swap = Operations(forks=((0, 1), (1, 0)), releases=(2,))
        logits = await generator.feed({0: [31], 1: [32]}, swap)
        expected = [[*PROMPTS[0][:5], 9, 31], [*PROMPTS[0], 32]]
        assert logits.argmax(-1).tolist() == [greedy(local, ids, 1)[0] for ids in expected]
        await session.close()

    run(source, SPLITS[1], test)


def test_a_draft_tree_attends_to_ancestors_only(
    source: ModelSource, local: PreTrainedModel
) -> None:
    async def test(s: Swarm, ends: ModelEnds) -> None:
        session = await s.client().open(s.route())
        generator = Generator(session, ends)
        await generator.feed({0: PROMPTS[0]})
        nodes, parents = [9, 12, 77, 30], (-1, 0, 0, -1)
        rows = ends.embed(torch.tensor(nodes), torch.tensor(nodes))
        out = await session.step(rows, {0: (7, 4)}, phase="verify", parents=parents, want="all")
        chosen = ends.logits(ends.norm(out)).argmax(-1).tolist()
        paths = [[9], [9, 12], [9, 77], [30]]
        assert chosen == [greedy(local, [*PROMPTS[0], *path], 1)[0] for path in paths]
        await session.close()

    run(source, SPLITS[1], test)
