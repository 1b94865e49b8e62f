"""The client of the pipeline benchmark, in a process and a host of its own.

JSON lines: a `Job` in, then one `Request` a line. Each is answered by `{"first": ...}` when
every row has its first token, and by an `Answer` at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import torch

from benchmarks.worker import TokenClock, prompts
from bloombee import AutoDistributedModelForCausalLM
from bloombee.config.client import ClientSettings
from bloombee.protocol.messages import Sampling


class Job(msgspec.Struct, frozen=True):
    """What to load."""

    model: str
    dtype: str
    initial_peers: list[str]


class Request(msgspec.Struct, frozen=True):
    """Greedy tokens for `batch` prompts.

    With the server head, `groups` sessions of equal size run side by side. With the client
    head there is one session, whose steps are cut into `groups` parts that wait for each other.
    """

    head: str
    batch: int
    groups: int
    prompt_tokens: int
    new_tokens: int


class First(msgspec.Struct, frozen=True):
    """When every row had a token, on the machine's monotonic clock."""

    first_s: float


class Answer(msgspec.Struct, frozen=True):
    """Times of all tokens of each row, and of the call (the machine's monotonic clock)."""

    began_s: float
    times_s: list[list[float]]
    ids: list[list[int]]

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

    def run(self, request: Request) -> Answer:
        """Generate; says when all rows have a token."""
        if request.head == "server":
            return asyncio.run(_grouped(self.model(1), request))
        return _with_barrier(self.model(request.groups), request)


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


async def _grouped(model: Any, request: Request) -> Answer:
    ids = prompts(request.batch, request.prompt_tokens, model.config.vocab_size).tolist()
    times_s: list[list[float]] = [[] for _ in ids]
    tokens: list[list[int]] = [[] for _ in ids]
    left = set(range(len(ids)))
    began_s = time.perf_counter()

    async def follow(rows: range) -> None:
        sampling = [Sampling(budget=request.new_tokens)] * len(rows)
        async for token in model.decode([ids[row] for row in rows], sampling):
            row = rows[token.row]
            times_s[row].append(time.perf_counter())
            tokens[row].append(token.id)
            if row in left:
                left.remove(row)
                if not left:
                    _say(First(times_s[row][0]))

    bounds = [request.batch * group // request.groups for group in range(request.groups + 1)]
    async with asyncio.TaskGroup() as tasks:
        for start, stop in zip(bounds, bounds[1:], strict=False):
            tasks.create_task(follow(range(start, stop)))
    return Answer(began_s, times_s, tokens)


def main() -> None:
    """Serve requests from standard input."""
    torch.set_num_threads(1)
    bench = Bench(msgspec.json.decode(sys.stdin.readline(), type=Job))
    print("ready", flush=True)
    for line in sys.stdin:
        _say(bench.run(msgspec.json.decode(line, type=Request)))


if __name__ == "__main__":
    main()
