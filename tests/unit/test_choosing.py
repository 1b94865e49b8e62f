"""Steps of ids and steps that choose tokens share passes with all others, and nothing else."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from bloombee.core import PackedTable, Phase, SessionId, Span
from bloombee.errors import StepFailed, Unsupported
from bloombee.models.sampling import Chooser
from bloombee.protocol.messages import Sampling
from bloombee.server import forward
from bloombee.server.executor import ExecutorSettings
from bloombee.server.work import Outcome, StepWork
from tests.counting_pool import SPAN, VOCABULARY, WIDTH, AddingModel, CountingPool
from tests.inline_executor import InlineExecutor
from tests.swarm.chaos import digests
from tests.virtual_time import run as run_in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

A, B, C = (SessionId(bytes([letter]) * 16) for letter in b"ABC")


def chooser(**parameters: Any) -> Chooser:
    return Chooser.of(msgspec.structs.replace(Sampling(budget=100), **parameters), VOCABULARY)


def chain(*counts: int, start: int = 0) -> PackedTable:
    return PackedTable(tuple(range(len(counts))), (start,) * len(counts), counts)


def rows_of(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, WIDTH)


class Bench:
    """An executor in virtual time; what is submitted before an await is seen at once."""

    def __init__(self) -> None:
        self.model, self.pool = AddingModel(), CountingPool()
        self.executor = InlineExecutor(self.model, self.pool, ExecutorSettings(pass_tokens=8))

    def submit(
        self,
        session: SessionId,
        table: PackedTable,
        rows: torch.Tensor,
        *choosers: Chooser | None,
        phase: Phase = Phase.DECODE,
        wanted: str = "all",
    ) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.executor.submit(
            StepWork(
                session=session,
                step=1,
                phase=phase,
                span=SPAN,
                table=table,
                touches=frozenset(table.sequences),
                operations=None,
                rows=rows,
                wanted=wanted,  # type: ignore[reportArgumentType] - a literal at every call
                wire_dtype=torch.float32,
                done=future.set_result,
                choosers=choosers,
            )
        )
        return future

    async def lengths(self, session: SessionId) -> tuple[int, ...]:
        return await self.executor.call(lambda pool: pool.lengths(session))


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        bench.executor.start()
        for session in (A, B, C):
            await bench.executor.call(lambda pool, session=session: pool.reserve(session, 3, 50))
        await test(bench)
        await bench.executor.stop(1.0)

    run_in_virtual_time(main())


def tokens(outcome: Outcome) -> list[int]:
    assert outcome.error is None
    assert outcome.rows is not None and outcome.rows.shape == (0, WIDTH)
    return [each.token for each in outcome.chosen]


def test_ids_and_rows_share_a_pass_and_the_head_is_asked_once() -> None:
    async def test(bench: Bench) -> None:
        ids = bench.submit(A, chain(1, 1), torch.tensor([7, 30], dtype=torch.int32))
        rows = bench.submit(B, chain(1, 1), rows_of([11, 12]), chooser(), None)
        both = bench.submit(C, chain(1, 1, 1), torch.tensor([20, 21, 1]), *[chooser()] * 3)
        plain = (await ids).rows
        assert plain is not None and plain[:, 0].tolist() == [11, 34]
        assert (await ids).chosen == ()
        assert tokens(await rows) == [15]
        assert tokens(await both) == [24, 25, 5]
        assert len(bench.model.batches) == 1
        assert bench.model.embedded == [[7, 30, 20, 21, 1]]
        assert bench.model.scored == [4]

    run(test)


def test_a_prompt_in_chunks_chooses_at_its_end() -> None:
    async def test(bench: Bench) -> None:
        first, last = chooser(), chooser()
        ids = torch.arange(20, dtype=torch.int32)
        prompt = bench.submit(A, chain(3, 5, 12), ids, first, None, last, phase=Phase.PREFILL)
        assert tokens(await prompt) == [2 + 4, 19 + 4]
        assert [len(each) for each in bench.model.embedded] == [8, 8, 4]
        assert bench.model.scored == [2]
        assert (first.drawn, last.drawn) == (1, 1)
        assert await bench.lengths(A) == (3, 5, 12)

    run(test)


def test_a_prompt_that_chooses_nothing_goes_through_no_head() -> None:
    async def test(bench: Bench) -> None:
        table = chain(3)
        outcome = await bench.submit(A, table, rows_of([1, 2, 3]), None, wanted="none")
        assert tokens(outcome) == []
        outcome = await bench.submit(B, table, torch.tensor([1, 2, 3]), wanted="none")
        assert tokens(outcome) == []
        assert bench.model.scored == []

    run(test)


@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0}])
def test_one_bad_choice_fails_its_own_step(parameters: dict[str, Any]) -> None:
    async def test(bench: Bench) -> None:
        good, bad, other = chooser(), chooser(**parameters), chooser(budget=1)
        a = bench.submit(A, chain(1), rows_of([3]), good)
        b = bench.submit(B, chain(1, 1), rows_of([4, torch.nan]), other, bad)
        c = bench.submit(C, chain(1), torch.tensor([5]))
        assert tokens(await a) == [7]
        error = (await b).error
        assert type(error) is StepFailed and "not finite" in str(error)
        rows = (await c).rows
        assert rows is not None and rows[0, 0] == 9
        assert len(bench.model.batches) == 1  # nobody's blocks ran twice
        assert [each.drawn for each in (good, bad, other)] == [1, 0, 0]
        assert [await bench.lengths(session) for session in (A, B)] == [(1, 0, 0), (0, 0, 0)]
        again = bench.submit(B, chain(1, 1), rows_of([4, 2]), other, bad)
        first, second = (await again).chosen
        assert (first.token, first.finished) == (8, "length")
        assert second.finished == ""

    run(test)


def test_a_chunked_prompt_whose_choice_fails_is_forgotten() -> None:
    async def test(bench: Bench) -> None:
        rows = rows_of([*range(19), torch.nan])
        prompt = bench.submit(A, chain(20), rows, chooser(), phase=Phase.PREFILL)
        assert type((await prompt).error) is StepFailed
        assert await bench.lengths(A) == (0, 0, 0)

    run(test)


def test_a_pass_that_fails_for_one_draws_once_for_the_others() -> None:
    async def test(bench: Bench) -> None:
        bench.model.failing[B] = RuntimeError("out of luck")
        mine, others = chooser(temperature=1.0, seed=3), chooser(temperature=1.0, seed=3)
        a = bench.submit(A, chain(1), rows_of([3]), mine)
        b = bench.submit(B, chain(1), rows_of([3]), chooser())
        assert tokens(await a) == [
            choose.token
            for choose in (await bench.submit(C, chain(1), rows_of([3]), others)).chosen
        ]
        assert type((await b).error) is StepFailed
        assert mine.drawn == others.drawn == 1

    run(test)


def test_a_head_that_is_not_held_fails_who_asks_for_it() -> None:
    async def test(bench: Bench) -> None:
        def logits(rows: torch.Tensor) -> torch.Tensor:
            raise Unsupported("no head here")

        bench.model.logits = logits
        a = bench.submit(A, chain(1), rows_of([3]), chooser())
        b = bench.submit(B, chain(1), rows_of([3]))
        assert type((await a).error) is Unsupported
        assert (await b).error is None

    run(test)


def test_many_rows_go_through_the_head_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "HEAD_ROWS", 2)

    async def test(bench: Bench) -> None:
        own = [chooser(), chooser(), chooser()]
        good = bench.submit(A, chain(1, 1, 1), rows_of([3, 4, 5]), *own)
        bad = bench.submit(B, chain(1, 1), rows_of([3, torch.nan]), chooser(), own_of_bad)
        assert tokens(await good) == [7, 8, 9]
        assert bench.model.scored == [2, 2, 1, 2, 1, 2]  # together in vain, then each alone
        assert [each.drawn for each in own] == [1, 1, 1]
        assert type((await bad).error) is StepFailed and own_of_bad.drawn == 0

    own_of_bad = chooser()
    run(test)


def test_decode_rows_are_bounded_as_told() -> None:
    async def test(bench: Bench) -> None:
        bench.executor.set_decode_rows(2)
        steps = [bench.submit(s, chain(1), rows_of([3]), chooser()) for s in (A, B, C)]
        assert [tokens(await step) for step in steps] == [[7], [7], [7]]
        assert [len(batch) for batch in bench.model.batches] == [2, 1]
        assert bench.model.scored == [2, 1]

    run(test)


PROMPT = [5, 900, 17]
SPANNED = Span(0, 3)


def loop_of(number: int) -> Sampling:
    """Parameters that differ from sequence to sequence."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 5.0, "seed": 7, "stream": number},
        {"temperature": 3.0, "top_k": 9, "seed": 7, "stream": number},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "context": bytes(4)},
    ]
    return msgspec.structs.replace(Sampling(budget=100), **kinds[number % len(kinds)])


async def generate(executor: InlineExecutor, number: int, luck: random.Random) -> list[int]:
    """A prompt, in pieces, then ids as they are chosen; waits a while now and then."""
    session = SessionId(number.to_bytes(16, "big"))
    await executor.call(lambda pool: pool.reserve(session, 1, 40))
    own = Chooser.of(loop_of(number), digests.VOCABULARY)
    made: list[int] = []
    fed, held = [*PROMPT, number], 0
    for step in range(12):
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        ids: torch.Tensor = torch.tensor(fed, dtype=torch.int32)
        embedded = digests.embed(fed, range(held, held + len(fed)))
        executor.submit(
            StepWork(
                session=session,
                step=step + 1,
                phase=Phase.DECODE if step else Phase.PREFILL,
                span=SPANNED,
                table=PackedTable((0,), (held,), (len(fed),)),
                touches=frozenset((0,)),
                operations=None,
                rows=ids if luck.random() < 0.5 else embedded,
                wanted="last",
                wire_dtype=torch.float32,
                done=future.set_result,
                choosers=(own,),
            )
        )
        held += len(fed)
        (chosen,) = (await future).chosen
        made.append(chosen.token)
        fed = [chosen.token]
        if luck.random() < 0.3:
            await asyncio.sleep(luck.uniform(0, 3))
    return made


def generated(numbers: Sequence[int], seed: int, pass_tokens: int, rows: int | None) -> Any:
    luck = random.Random(seed)

    async def main() -> list[list[int]]:
        model, pool = digests.DigestModel(SPANNED), digests.DigestPool(SPANNED, 4000)
        settings = ExecutorSettings(pass_tokens=pass_tokens, chunk_tokens=2)
        executor = InlineExecutor(model, pool, settings, lambda tokens: 0.5)
        executor.start()
        executor.set_decode_rows(rows)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(generate(executor, number, random.Random(luck.random())))
                for number in numbers
            ]
        await executor.stop(1.0)
        return [task.result() for task in tasks]

    return run_in_virtual_time(main())


@pytest.mark.parametrize("seed", range(4))
def test_who_else_is_in_a_pass_changes_no_token(seed: int) -> None:
    luck = random.Random(seed)
    numbers = range(9)
    alone = [generated([number], seed, 64, None)[0] for number in numbers]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    crowd = generated(numbers, seed, luck.choice([2, 5, 64]), luck.choice([None, 1, 3]))
    assert crowd == alone
