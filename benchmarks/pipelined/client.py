"""The client of the pipeline benchmark, in a process and a host of its own.

JSON lines: a `Job` in, then one `Request` a line. Each is answered by `{"first": ...}` when
every row has its first token, and by an `Answer` at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from math import inf
from typing import Any

import msgspec
import torch

from benchmarks.worker import TokenClock, prompts
from bloombee import AutoDistributedModelForCausalLM
from bloombee.client.micro_batches import Strand
from bloombee.client.packing import Packing
from bloombee.client.server_head import Request as Call
from bloombee.config.client import ClientSettings
from bloombee.protocol.messages import Describe, Sampling, TraceReport

DESCRIBE_S = 10.0


class Job(msgspec.Struct, frozen=True):
    """What to load; with `trace` answers carry what the stages say of their sessions."""

    model: str
    dtype: str
    initial_peers: list[str]
    trace: bool = False


class Request(msgspec.Struct, frozen=True):
    """Greedy tokens for `batch` prompts.

    With the server head, `groups` sessions of equal size run side by side; 0 leaves their number
    to the client. With the client head there is one session, whose steps are cut into `groups`
    parts that wait for each other. After `seconds`, if given, the server head stops early, but not
    before every row has a token.
    """

    head: str
    batch: int
    groups: int
    prompt_tokens: int
    new_tokens: int
    seconds: float = 0.0


class First(msgspec.Struct, frozen=True):
    """When every row had a token, on the machine's monotonic clock."""

    first_s: float


class Answer(msgspec.Struct, frozen=True):
    """Times of all tokens of each row, and of the call (the machine's monotonic clock).

    `traces` of each stage, in order, if the job asked for them.
    """

    began_s: float
    times_s: list[list[float]]
    ids: list[list[int]]
    traces: list[list[TraceReport]] = []

    @property
    def first_after_s(self) -> float:
        """From the call to the first token of any row, in seconds."""
        return min(times[0] for times in self.times_s) - self.began_s


def _say(message: First | Answer) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


class Bench:
    """The model with each number of parts that was asked for."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._models: dict[int, Any] = {}
        self._seen: set[bytes] = set()

    def model(self, parts: int) -> Any:
        """A client whose decode steps go in so many parts (1: whole)."""
        if parts not in self._models:
            settings = ClientSettings()
            if parts > 1:
                settings = ClientSettings(
                    barrier=True, micro_batches=parts, steps_in_flight=2 * parts
                )
            self._models[parts] = AutoDistributedModelForCausalLM.from_pretrained(
                self._job.model,
                initial_peers=self._job.initial_peers,
                dtype=self._job.dtype,
                settings=settings,
            )
        return self._models[parts]

    def traces(self, model: Any) -> list[list[TraceReport]]:
        """What the stages of the last route say of our sessions that are new since last time."""
        told = model.loop.run(_told(model))
        new = [[each for each in stage if each.session not in self._seen] for stage in told]
        self._seen |= {each.session for stage in new for each in stage}
        return new

    def run(self, request: Request) -> Answer:
        """Generate, and ask what came of it where the job says so."""
        answer = self._generate(request)
        if not self._job.trace:
            return answer
        model = self.model(request.groups if request.head == "client" else 1)
        return msgspec.structs.replace(answer, traces=self.traces(model))

    def _generate(self, request: Request) -> Answer:
        """Generate; says when all rows have a token."""
        if request.head == "server" and not request.groups:
            return _as_it_likes(self.model(1), request)
        if request.head == "server":
            return asyncio.run(_grouped(self.model(1), request))
        return _with_barrier(self.model(request.groups), request)


async def _told(model: Any) -> list[list[TraceReport]]:
    found: list[list[TraceReport]] = []
    for stage in model.route.stages:
        connection = await model.access.connect(model.access.endpoints(stage.peer)[0])
        try:
            await connection.send(Describe(topics=("traces",)))
            description, _ = await connection.receive(DESCRIBE_S)
        finally:
            await connection.close()
        found.append(list(description.traces))
    return found


class _Clock(TokenClock):
    """Says when the first tokens came."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        never = super().__call__(input_ids, _scores)
        if len(self.times) == 1:
            _say(First(self.times[0]))
        return never


def _with_barrier(model: Any, request: Request) -> Answer:
    from transformers import StoppingCriteriaList

    ids = prompts(request.batch, request.prompt_tokens, model.config.vocab_size)
    clock, began_s = _Clock(), time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            head="client",
            max_new_tokens=request.new_tokens,
            min_new_tokens=request.new_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    new = out[:, request.prompt_tokens :].tolist()
    return Answer(began_s, [clock.times] * request.batch, new)


class _Notes:
    """The tokens of all rows and when they came; says when every row has one."""

    def __init__(self, request: Request) -> None:
        self.began_s = time.perf_counter()
        self._seconds = request.seconds or inf
        self._until_s = self.began_s + self._seconds
        self._times_s: list[list[float]] = [[] for _ in range(request.batch)]
        self._tokens: list[list[int]] = [[] for _ in range(request.batch)]
        self._left = set(range(request.batch))

    def take(self, row: int, token: int) -> bool:
        """Note one; whether there is time for more."""
        now_s = time.perf_counter()
        self._times_s[row].append(now_s)
        self._tokens[row].append(token)
        if row in self._left:
            self._left.remove(row)
            if not self._left:
                _say(First(now_s))
                # Late prompts leave half of the time for what is measured.
                self._until_s = max(self._until_s, now_s + self._seconds / 2)
        return bool(self._left) or now_s < self._until_s

    def answer(self) -> Answer:
        """All of it."""
        return Answer(self.began_s, self._times_s, self._tokens)


def _as_it_likes(model: Any, request: Request) -> Answer:
    """A batch as `generate` sends it, with as many micro-batches as the client chooses."""
    ids = prompts(request.batch, request.prompt_tokens, model.config.vocab_size)
    rows, columns = tuple(ids.tolist()), request.prompt_tokens
    samplings = (Sampling(budget=request.new_tokens),) * len(rows)
    call = Call(Strand(0, rows, samplings), Packing.of(len(rows), columns, None), None)
    notes = _Notes(request)
    with contextlib.closing(model.stream_tokens(call, None)) as stream:
        for tokens in stream:
            more = [notes.take(token.row, token.id) for token in tokens]
            if not all(more):
                break
    return notes.answer()


async def _grouped(model: Any, request: Request) -> Answer:
    ids = prompts(request.batch, request.prompt_tokens, model.config.vocab_size).tolist()
    notes = _Notes(request)

    async def follow(rows: range) -> None:
        sampling = [Sampling(budget=request.new_tokens)] * len(rows)
        stream = model.decode([ids[row] for row in rows], sampling)
        async with contextlib.aclosing(stream):
            async for token in stream:
                if not notes.take(rows[token.row], token.id):
                    break

    bounds = [request.batch * group // request.groups for group in range(request.groups + 1)]
    async with asyncio.TaskGroup() as tasks:
        for start, stop in zip(bounds, bounds[1:], strict=False):
            tasks.create_task(follow(range(start, stop)))
    return notes.answer()


def main() -> None:
    """Serve requests from standard input."""
    torch.set_num_threads(1)
    bench = Bench(msgspec.json.decode(sys.stdin.readline(), type=Job))
    print("ready", flush=True)
    for line in sys.stdin:
        _say(bench.run(msgspec.json.decode(line, type=Request)))


if __name__ == "__main__":
    main()
