"""`bloombee-batch` without a swarm: lines, answers, going on after a crash, exit codes."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloombee.cli.batch import main
from bloombee.cli.batch_output import AnswerFile
from bloombee.errors import SwarmError
from tests.scripted_model import ScriptedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWNe4LHYBLB1LuUvqHooZEmG5hCjUXFMFBTGy6Z3gUMSmi"


@dataclass
class Bench:
    """A folder to work in, and a model that answers with its prompt."""

    folder: Path
    prepare: Callable[[ScriptedModel], object] = lambda _: None
    fingerprint: str = "f"
    models: list[ScriptedModel] = field(default_factory=list[ScriptedModel])

    @property
    def input(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    def write(self, *lines: object) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("\n".join(texts) + "\n", encoding="utf-8")

    def run(self, *flags: str) -> int:
        named = ("--model", "m", "--initial-peers", PEER, "--log-level", "error")
        return main((*named, "--input", str(self.input), "--output", str(self.output), *flags))

    def load(self, *_: object, **__: object) -> ScriptedModel:
        model = ScriptedModel()
        self.prepare(model)
        self.models.append(model)
        return model

    def answers(self) -> list[Any]:
        return read(self.output)

    def errors(self) -> list[Any]:
        return read(self.folder / "out.jsonl.errors")

    def texts(self) -> dict[int, str]:
        return {
            each["line"]: each["response"]["body"]["choices"][0]["text"] for each in self.answers()
        }


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running(tmp_path) as bench:
        yield bench


@contextmanager
def running(folder: Path) -> Iterator[Bench]:
    bench = Bench(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "bloombee.client.AutoDistributedModelForCausalLM",
            SimpleNamespace(from_pretrained=bench.load),
        )
        patch.setattr(
            "bloombee.models.open_source",
            lambda _: SimpleNamespace(fingerprint=bench.fingerprint),
        )
        yield bench


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}"} for number in range(1, count + 1)]


# Forms --------------------------------------------------------------------------------------


def test_lines_of_every_form_are_answered_in_openai_s(bench: Bench) -> None:
    bench.write(
        {"prompt": "plain", "custom_id": "first"},
        {"messages": [{"role": "user", "content": "chat"}], "max_tokens": 2},
        {
            "custom_id": "third",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "gpt",
                "messages": [
                    {"role": "developer", "content": "be"},
                    {"role": "user", "content": [{"type": "text", "text": " good"}]},
                ],
                "logprobs": True,
                "top_logprobs": 2,
                "n": 2,
                "stream": False,
                "tools": None,
            },
        },
        {"custom_id": "4", "url": "/v1/completions", "body": {"prompt": [65, 66], "stop": "B"}},
    )
    assert bench.run("--temperature", "0.5") == 0
    plain, chat, third, fourth = sorted(bench.answers(), key=lambda each: each["line"])
    assert plain["custom_id"] == "first"
    assert plain["id"].startswith("batch_req_")
    assert plain["error"] is None
    assert plain["response"]["status_code"] == 200
    body = plain["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "scripted"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "plain",
            "finish_reason": "stop",
            "logprobs": {
                "tokens": list("plain"),
                "token_logprobs": [-0.5] * 5,
                "top_logprobs": [{}] * 5,
                "text_offset": [0, 1, 2, 3, 4],
            },
        }
    ]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert chat["custom_id"] == "line-2"
    choice = chat["response"]["body"]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ch"}
    assert choice["finish_reason"] == "length"
    choices = third["response"]["body"]["choices"]
    assert [each["message"]["content"] for each in choices] == ["be good", "BE GOOD"]
    scored = choices[1]["logprobs"]["content"][0]
    assert scored == {"token": "B", "logprob": -0.5, "bytes": [66], "top_logprobs": []}
    assert fourth["response"]["body"]["choices"][0]["text"] == "A"
    asked = {len(each) for each in bench.models[0].asked}
    assert asked == {1, 2}
    assert {each[0].temperature for each in bench.models[0].asked} == {0.5}


BAD: list[tuple[object, str]] = [
    ("{not json", "not JSON: "),
    ('{"prompt": "\\ud800"}', "not JSON: "),
    ("[1]", "not a JSON object"),
    ({"text": "x"}, "give prompt, messages, or url and body"),
    ({"prompt": "x", "max_tokens": "3"}, "max_tokens: should be a valid integer, got '3'"),
    ({"prompt": "x", "max_tokens": 0}, "max_new_tokens=0: give an integer from 1"),
    ({"prompt": "x", "tools": []}, "tools: not supported here; leave it out"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: keys are token ids, got 'a'"),
    ({"prompt": ["x", "y"]}, "prompt"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "x" * 990}, "990 tokens and up to 128 new ones are more than"),
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]: should be 'system'"),
    ({"prompt": "x", "custom_id": 3}, "custom_id: should be a text"),
    ({"url": "/v1/embeddings", "body": {}}, "url: should be /v1/chat/completions or"),
    ({"url": "/v1/completions", "body": 3}, "body: should be a JSON object"),
    ({"url": "/v1/completions", "body": {}, "extra": 1}, "extra: unknown beside url and body"),
    ({"url": "/v1/completions", "body": {"prompt": "x"}, "method": "GET"}, "method: should be"),
    ({"prompt": "x", "stream": True}, "stream: should be False"),
]


def test_bad_lines_are_told_with_their_number_and_skipped(bench: Bench) -> None:
    bench.write({"prompt": "good"}, *(line for line, _ in BAD), "", {"prompt": "too"})
    assert bench.run() == 1
    assert bench.texts() == {1: "good", len(BAD) + 3: "too"}
    errors = {each["line"]: each for each in bench.errors()}
    assert sorted(errors) == list(range(2, len(BAD) + 2))
    for number, (_, says) in enumerate(BAD, start=2):
        assert says in errors[number]["error"]["message"], number
        assert errors[number]["response"] is None
        assert errors[number]["error"]["code"] == "request"


def test_bad_lines_alone_need_no_swarm(bench: Bench) -> None:
    bench.write("{")
    assert bench.run() == 1
    assert bench.models == []
    assert bench.output.read_bytes() == b""


def test_a_custom_id_that_comes_twice_is_told(bench: Bench) -> None:
    bench.write(*({"prompt": text, "custom_id": "same"} for text in "ab"), {"prompt": "c"})
    assert bench.run() == 1
    assert bench.texts() == {1: "a", 3: "c"}
    assert bench.errors()[0]["error"]["message"] == "custom_id 'same' is that of line 1, too"


# Going on -----------------------------------------------------------------------------------


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(0, 4000))
def test_wherever_a_run_was_cut_the_next_goes_on(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running(tmp_path_factory.mktemp("cut")) as bench:
        bench.write(*prompts(8))
        assert bench.run() == 0
        whole = bench.output.read_bytes()
        kept = whole[: cut % (len(whole) + 1)]
        bench.output.write_bytes(kept)
        done = kept.count(b"\n")
        assert bench.run() == 0
        assert bench.output.read_bytes().startswith(whole[: kept.rfind(b"\n") + 1])
        assert bench.texts() == {number: f"p{number}" for number in range(1, 9)}
        assert len(bench.answers()) == 8
        assert sum(model.opened for model in bench.models) == 8 + (8 - done)


def test_what_is_answered_is_not_asked_again_and_lines_may_be_added(bench: Bench) -> None:
    bench.write(*prompts(3))
    assert bench.run() == 0
    assert bench.run() == 0
    assert len(bench.models) == 1
    bench.write(*prompts(5))
    assert bench.run() == 0
    assert bench.models[1].opened == 2
    assert len(bench.answers()) == 5


def test_a_line_that_failed_is_asked_again_and_may_be_mended(bench: Bench) -> None:
    bench.prepare = lambda model: model.failures.update({ord("b"): SwarmError("nobody")})
    bench.write({"prompt": "a"}, {"prompt": "bb"}, "{")
    assert bench.run() == 1
    assert [each["line"] for each in bench.errors()] == [3, 2]
    bench.prepare = lambda _: None
    bench.write({"prompt": "a"}, {"prompt": "bb"}, {"prompt": "c"})
    assert bench.run() == 0
    assert bench.texts() == {1: "a", 2: "bb", 3: "c"}
    assert not (bench.folder / "out.jsonl.errors").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: bench.write({"prompt": "p1"}, {"prompt": "other"}, {"prompt": "p3"}),
        lambda bench: bench.write(*prompts(3)[1:]),
        lambda bench: setattr(bench, "fingerprint", "g"),
    ],
)
def test_answers_to_something_else_are_not_mixed_with(
    bench: Bench, change: Callable[[Bench], object], capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(*prompts(3))
    assert bench.run() == 0
    before = bench.output.read_bytes()
    change(bench)
    assert bench.run() == 2
    complaint = capsys.readouterr().err
    assert "answers in" in complaint
    assert complaint.count("\n") == 1
    assert bench.output.read_bytes() == before


def test_nor_are_those_of_other_flags(bench: Bench) -> None:
    bench.write(*prompts(1))
    assert bench.run("--max-new-tokens", "5") == 0
    assert bench.run("--max-new-tokens", "6") == 2
    assert bench.run("--max-new-tokens", "5", "--concurrency", "1") == 0


def test_a_file_of_something_else_is_left_alone(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(*prompts(1))
    bench.output.write_text('{"my": "data"}\nnot finished', encoding="utf-8")
    assert bench.run() == 2
    assert "line 1 of" in capsys.readouterr().err
    assert bench.output.read_text(encoding="utf-8") == '{"my": "data"}\nnot finished'


def test_one_output_is_one_run_s(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write(*prompts(1))
    with AnswerFile(bench.output):
        assert bench.run() == 2
    assert "another run writes" in capsys.readouterr().err
    assert bench.run() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--input", "/no/such"), "there is no file /no/such"),
        (("--output", "/no/such/file"), "--output: can't write"),
        (("--temperature", "-1"), "temperature=-1.0: give a number from 0"),
    ],
)
def test_wrong_usage_is_one_line(
    bench: Bench, flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(*prompts(1))
    assert bench.run(*flags) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("bloombee-batch: ")
    assert says in complaint
    assert complaint.count("\n") == 1


def test_files_are_not_written_over_each_other(bench: Bench) -> None:
    bench.write(*prompts(1))
    assert bench.run("--output", str(bench.input)) == 2
    assert bench.run("--errors", str(bench.input)) == 2
    assert read(bench.input) == prompts(1)


# Ends ---------------------------------------------------------------------------------------


def test_when_the_swarm_is_gone_it_ends(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.prepare = lambda model: model.failures.update({ord("p"): SwarmError("nobody is there")})
    bench.write(*prompts(40))
    assert bench.run("--concurrency", "2") == 1
    assert "nobody is there" in capsys.readouterr().err
    assert bench.models[0].opened < 20
    bench.prepare = lambda _: None
    assert bench.run() == 0
    assert len(bench.texts()) == 40


def test_after_an_interrupt_what_was_finished_is_there(bench: Bench) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def prepare(model: ScriptedModel) -> None:
        model.reply = lambda prompt, _: [65] * 900 if prompt == tuple(b"p2") else list(prompt)
        model.pause_s = 0.01

        def interrupt() -> None:
            while model.opened < 8:
                threading.Event().wait(0.01)
            signal.pthread_kill(main_thread, signal.SIGINT)

        threading.Thread(target=interrupt).start()

    bench.prepare = prepare
    bench.write(*prompts(8))
    assert bench.run("--concurrency", "2", "--max-new-tokens", "900") == 130
    assert {1, 3, 4, 5, 6} <= set(bench.texts())
    assert 2 not in bench.texts()
    assert bench.models[0].open == 0
    bench.prepare = lambda _: None
    assert bench.run("--max-new-tokens", "900") == 0
    assert bench.texts() == {number: f"p{number}" for number in range(1, 9)}
