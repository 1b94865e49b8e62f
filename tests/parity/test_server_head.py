"""The real model's ends on servers: logits are the client's bit for bit, tokens transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bloombee.core import PackedTable, Phase, SessionId, Span
from bloombee.kv import make_pool
from bloombee.models import ModelEnds, SpanModel, open_source
from bloombee.models.sampling import Chooser, draw
from bloombee.protocol.messages import Sampling
from bloombee.server.executor import ExecutorSettings
from bloombee.server.work import Outcome, StepWork
from tests.inline_executor import InlineExecutor
from tests.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.models import ModelSource

NEW_TOKENS = 8
SEED = 11
TEXTS = (
    "Once upon a time there was a",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    "Water boils at one hundred degrees. " * 3,
    "The",
)
SAMPLED = Sampling(
    budget=NEW_TOKENS,
    seed=SEED,
    temperature=0.9,
    top_k=60,
    top_p=0.92,
    repetition_penalty=1.15,
)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_source("smollm2")


@pytest.fixture(scope="module")
def served(source: ModelSource) -> SpanModel:
    whole = Span(0, source.num_blocks)
    return SpanModel.load_with_ends(source, whole, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def prompts(source: ModelSource) -> list[list[int]]:
    return [source.tokenizer()(text)["input_ids"] for text in TEXTS]


def loop(
    source: ModelSource, model: SpanModel, prompts: Sequence[list[int]], sampling: Sampling
) -> list[list[int]]:
    """What a server alone makes of prompts: each a session, merged as they wait."""

    async def main() -> list[list[int]]:
        pool = make_pool(source.kv_shape(model.span, model.dtype, "cpu"), 4096, max_length=512)
        executor = InlineExecutor(model, pool, ExecutorSettings(), lambda tokens: 1.0)
        executor.start()
        made: list[list[int]] = [[] for _ in prompts]

        def submit(number: int, fed: Sequence[int], held: int, own: Chooser) -> None:
            def done(outcome: Outcome) -> None:
                assert outcome.error is None
                (chosen,) = outcome.chosen
                made[number].append(chosen.token)
                if not chosen.finished:
                    submit(number, [chosen.token], held + len(fed), own)

            executor.submit(
                StepWork(
                    session=SessionId(number.to_bytes(16, "big")),
                    step=1,
                    phase=Phase.PREFILL if len(made[number]) == 0 else Phase.DECODE,
                    span=model.span,
                    table=PackedTable((0,), (held,), (len(fed),)),
                    touches=frozenset((0,)),
                    operations=None,
                    rows=torch.tensor(fed, dtype=torch.int32),
                    wanted="last",
                    wire_dtype=torch.float32,
                    done=done,
                    choosers=(own,),
                )
            )

        for number, prompt in enumerate(prompts):
            session = SessionId(number.to_bytes(16, "big"))
            await executor.call(lambda pool, session=session: pool.reserve(session, 1, 256))
            context = torch.tensor(prompt, dtype=torch.int32).numpy().tobytes()
            own = msgspec.structs.replace(sampling, stream=number, context=context)
            submit(number, prompt, 0, Chooser.of(own, model.vocab_size))
        while any(len(tokens) < NEW_TOKENS for tokens in made):
            await executor.free_tokens()
        await executor.stop(1.0)
        return made

    return run(main())


@pytest.mark.slow
def test_logits_are_the_clients_bit_for_bit(
    source: ModelSource, served: SpanModel, prompts: list[list[int]]
) -> None:
    ends = ModelEnds.load(source, dtype=torch.float32, device="cpu")
    ids = torch.tensor(prompts[1])
    with torch.inference_mode():
        rows = ends.embed(ids, torch.arange(len(ids)))
        assert torch.equal(served.embed(ids.int(), torch.arange(len(ids))), rows)
        logits = ends.logits(ends.norm(rows))
        assert torch.equal(served.logits(rows), logits)
        alone = torch.cat([served.logits(rows[n : n + 1]) for n in range(len(ids))])
        assert torch.equal(alone, logits)


@pytest.mark.slow
def test_tokens_are_those_of_transformers(
    source: ModelSource, served: SpanModel, prompts: list[list[int]]
) -> None:
    path = source.gguf_path
    assert path is not None
    local: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    local = cast("Any", local).eval()
    greedy = loop(source, served, prompts, Sampling(budget=NEW_TOKENS))
    sampled = loop(source, served, prompts, SAMPLED)
    warpers = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(SAMPLED.repetition_penalty),
            TemperatureLogitsWarper(SAMPLED.temperature),
            TopKLogitsWarper(SAMPLED.top_k),
            TopPLogitsWarper(SAMPLED.top_p),
        ]
    )
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        out = local.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert greedy[number] == out[0].tolist()[len(prompt) :]
        assert sampled[number] == drawn(local, warpers, prompt, number)


@torch.inference_mode()
def drawn(local: Any, warpers: LogitsProcessorList, prompt: list[int], stream: int) -> list[int]:
    """Sampling with transformers' own model and processors, and our generator."""
    ids = torch.tensor([prompt])
    for step in range(NEW_TOKENS):
        scores = local(ids).logits[:, -1].float()
        chances = warpers(ids, scores).softmax(-1)
        ids = torch.cat([ids, draw(chances, SEED, [stream], [step])[:, None]], dim=1)
    return ids[0, len(prompt) :].tolist()
