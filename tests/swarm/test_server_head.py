"""Loops of tokens under a real client: losses, cancellation, errors, room, and `decode`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.client.seeded_draws import SeededDraws
from bloombee.errors import DeadlineExceeded, RequestError, StepFailed, SwarmError
from bloombee.models import open_source
from bloombee.protocol.messages import Sampling
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.generation import mixed, prompt
from tests.swarm.disturbed import (
    GREEDY,
    IDS,
    THREE,
    all_free,
    favour,
    killer,
    recoveries,
    same,
    spares,
)
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bloombee.client.tokens import Token

BATCH_IDS, BATCH_MASK = mixed([3, 9, 6, 1, 12, 7], "left")
BATCH: dict[str, Any] = {"attention_mask": BATCH_MASK}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def local(llama: Path) -> Any:
    return reference(llama)


@pytest.fixture
def three(llama: Path) -> Iterator[ClientSwarm]:
    with ClientSwarm(open_source(str(llama)), THREE) as swarm:
        yield swarm


def parts(swarm: ClientSwarm, count: int, **changes: Any) -> Any:
    return swarm.model(QUICK.model_copy(update={"micro_batches": count, **changes}))


def slow(swarm: ClientSwarm, seconds: float) -> None:
    """Let every pass of the last stage take a while."""
    model: Any = swarm.stages[2]._parts.model
    forward = model.forward

    def slowly(*arguments: Any, **named: Any) -> torch.Tensor:
        pause = torch.zeros(1)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pause += 1
        return forward(*arguments, **named)

    model.forward = slowly


# Losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 2, 9])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_micro_batches_lose_a_stage(
    three: ClientSwarm, local: Any, index: int, number: int
) -> None:
    doomed = three.stages[index]
    favour(three, doomed)
    three.add(THREE[index])
    three.at_pass(doomed, number, killer(three, doomed))
    model = parts(three, 3)
    same(local, model, BATCH_IDS, head="server", **BATCH)
    assert recoveries(model) >= 1
    all_free(three)


def test_two_stages_at_once_while_tokens_are_drawn(three: ClientSwarm, local: Any) -> None:
    old = list(three.stages)
    spares(three)
    for stage in old:
        favour(three, stage)

    def strike() -> None:
        three.kill(old[0])
        three.kill(old[2])

    three.at_pass(old[1], 4, strike)
    arguments: dict[str, Any] = {
        "do_sample": True,
        "repetition_penalty": 1.4,
        "eos_token_id": None,
        "pad_token_id": 0,
        "max_new_tokens": 16,
    }
    with SeededDraws(3):
        expected = local.generate(BATCH_IDS, **BATCH, **arguments)
    model = parts(three, 2)
    found = model.generate(BATCH_IDS, seed=3, head="server", **BATCH, **arguments)
    assert found.tolist() == expected.tolist()
    assert recoveries(model) >= 2
    all_free(three)


@pytest.mark.parametrize("number", [3, 8])
def test_the_last_stage_can_no_longer_reach_the_first(
    three: ClientSwarm, local: Any, number: int
) -> None:
    """Only the ring breaks: one of its two ends is given up in the end."""
    first, _, last = three.stages
    favour(three, first)
    three.add(THREE[0])
    peers = first.endpoint.peer, last.endpoint.peer
    three.at_pass(last, number, lambda: three.network.isolate(peers[1], [peers[0]]))
    model = parts(three, 1, stage_s=1.5)
    same(local, model, head="server")
    assert recoveries(model) >= 1
    assert three.serving(model, 0) is not first
    three.now(three.network.heal)
    all_free(three)


# The caller gives up -------------------------------------------------------------------------


def test_a_deadline_ends_a_loop_and_the_session_goes_on(three: ClientSwarm, local: Any) -> None:
    slow(three, 0.03)
    model = three.model()
    with model.inference_session(max_length=400) as session:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            model.generate(IDS, head="server", deadline_s=0.5, max_new_tokens=300, **GREEDY)
        assert time.monotonic() - begun < 3
        assert 9 < session.position < 60
        for text in (IDS, torch.cat((IDS, prompt(1, 5)), 1)):
            same(local, model, text, head="server")
    all_free(three)


def test_who_leaves_the_tokens_frees_the_servers(three: ClientSwarm) -> None:
    slow(three, 0.02)
    model = three.model()

    async def few() -> list[Token]:
        told: list[Token] = []
        tokens = model.decode([IDS[0].tolist()] * 2, [Sampling(400)] * 2)
        async for token in tokens:
            told.append(token)
            if len(told) == 6:
                break
        await tokens.aclose()
        return told

    told = asyncio.run(few())
    assert sorted(token.row for token in told) == [0, 0, 0, 1, 1, 1]
    all_free(three)


def test_a_cancelled_reader_frees_the_servers(three: ClientSwarm) -> None:
    slow(three, 0.02)
    model = three.model()

    async def read() -> None:
        async for _ in model.decode([IDS[0].tolist()], [Sampling(400)]):
            pass

    async def impatient() -> None:
        async with asyncio.timeout(0.4):
            await read()

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    all_free(three)


# Errors ----------------------------------------------------------------------------------------


def test_a_stage_that_fails_again_and_again_is_told(three: ClientSwarm) -> None:
    model: Any = three.stages[1]._parts.model
    forward, passes = model.forward, iter(range(100))

    def failing(*arguments: Any, **named: Any) -> torch.Tensor:
        if next(passes) > 4:
            raise RuntimeError("injected")
        return forward(*arguments, **named)

    model.forward = failing
    with pytest.raises(StepFailed, match="injected"):
        three.model().generate(IDS, head="server", max_new_tokens=20, **GREEDY)
    all_free(three)


def test_blocks_that_nobody_holds_any_more_are_told(three: ClientSwarm) -> None:
    doomed = three.stages[1]

    def strike() -> None:
        three.kill(doomed)
        three.lost.add(doomed.endpoint.peer)  # pyright: ignore[reportArgumentType] - a peer id

    three.at_pass(doomed, 4, strike)
    model = parts(three, 3, recovery_s=0.6)
    with pytest.raises(SwarmError, match="2:4"):
        model.generate(BATCH_IDS, head="server", max_new_tokens=20, **GREEDY, **BATCH)
    all_free(three)


@pytest.mark.parametrize(
    ("prompts", "samplings", "reason"),
    [
        ([], [], "0 prompts"),
        ([[5]], [], "1 prompts with 0 samplings"),
        ([[5], []], [Sampling(3)] * 2, "prompt 1 is empty"),
        ([[5, 9999]], [Sampling(3)], "9999 of prompt 0 is outside"),
        ([[5]], [Sampling(0)], "budget"),
        ([[5]], [Sampling(3, top_p=7.0)], "top_p 7.0"),
        ([[5]], [Sampling(9000)], "more than"),
    ],
)
def test_prompts_that_make_no_sense(
    three: ClientSwarm, prompts: list[list[int]], samplings: list[Sampling], reason: str
) -> None:
    model = three.model()

    async def ask() -> None:
        async for _ in model.decode(prompts, samplings):
            pass

    with pytest.raises(RequestError, match=reason):
        asyncio.run(ask())
    all_free(three)


# Room ------------------------------------------------------------------------------------------


def test_sessions_that_find_no_room_wait_for_others_of_the_call(llama: Path, local: Any) -> None:
    """Room for two of six rows at once."""
    with ClientSwarm(open_source(str(llama)), THREE, Size(kv_tokens=64)) as swarm:
        model = parts(swarm, 6, queue_s=0.05)
        same(local, model, BATCH_IDS, head="server", max_new_tokens=18, **BATCH)
        all_free(swarm)


# Tokens one by one -----------------------------------------------------------------------------


def rows_of(tokens: list[Token], rows: int) -> list[list[int]]:
    return [[token.id for token in tokens if token.row == row] for row in range(rows)]


def expected_rows(local: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    made = [local.generate(torch.tensor([ids]), max_new_tokens=new, **GREEDY) for ids in prompts]
    return [row[0, len(ids) :].tolist() for row, ids in zip(made, prompts, strict=True)]


@pytest.mark.parametrize("where", ["own loop", "client's loop"])
def test_decode_from_any_loop(three: ClientSwarm, local: Any, where: str) -> None:
    model = three.model()
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in (3, 80, 11)]
    samplings = [Sampling(5), Sampling(11), Sampling(8)]

    async def read() -> list[Token]:
        return [token async for token in model.decode(prompts, samplings)]

    run: Callable[[Any], Any] = asyncio.run if where == "own loop" else three.loop.run
    told: list[Token] = run(read())
    wanted = expected_rows(local, prompts, 11)
    assert rows_of(told, 3) == [wanted[0][:5], wanted[1], wanted[2][:8]]
    assert [(t.row, t.finished) for t in told if t.finished] == [
        (0, "length"),
        (2, "length"),
        (1, "length"),
    ]
    all_free(three)


def test_decode_tells_how_likely_tokens_were(three: ClientSwarm, local: Any) -> None:
    model = three.model()
    ids = IDS[0].tolist()

    async def read() -> list[Token]:
        samplings = [Sampling(4, logprobs=3), Sampling(4)]
        return [token async for token in model.decode([ids, ids], samplings)]

    told = asyncio.run(read())
    scores = local(torch.tensor([ids + [t.id for t in told if t.row == 0][:3]])).logits
    wanted = scores[0, -4:].detach().log_softmax(-1)
    for position, token in enumerate(t for t in told if t.row == 0):
        assert token.logprob == pytest.approx(float(wanted[position, token.id]), abs=1e-4)
        best = wanted[position].topk(2)
        assert [each for each, _ in token.alternatives] == best.indices.tolist()
    assert all(t.logprob is None and not t.alternatives for t in told if t.row == 1)


def test_many_decode_at_once(three: ClientSwarm, local: Any) -> None:
    model = three.model()
    prompts = [prompt(1, 3 + n, seed=n)[0].tolist() for n in range(10)]

    async def one(ids: list[int]) -> list[int]:
        return [token.id async for token in model.decode([ids], [Sampling(9)])]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(all_of_them()) == expected_rows(local, prompts, 9)
    all_free(three)
