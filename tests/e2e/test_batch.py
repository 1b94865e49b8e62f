"""A batch whose process and whose servers are killed: every line is answered once, and the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bloombee.cli.local_swarm import LocalSwarm
from tests.e2e.dht_processes import ROOT, wait_until
from tests.e2e.disturbances import MODEL, SERVER_FLAGS, wait_free

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LINES = 40
ANSWER_S = 90.0
THINGS = ("bees", "rivers", "clocks", "bread", "the moon", "maps", "violins", "glass")


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    with LocalSwarm(MODEL, ["0:10", "10:20", "20:30"], server_flags=SERVER_FLAGS) as swarm:
        yield swarm


def line(number: int) -> dict[str, Any]:
    """One of every form, greedy and sampled."""
    about = THINGS[number % len(THINGS)]
    asked = {"max_tokens": 6 + number % 7}
    if number % 4 == 0:
        return {"prompt": f"Number {number}: {about} are", **asked}
    messages = [{"role": "user", "content": f"Say something about {about}."}]
    if number % 4 == 1:
        return {"messages": messages, "temperature": 0.8, "seed": number, **asked}
    body = {"model": "any", "messages": messages, "logprobs": True, **asked}
    if number % 4 == 2:
        body = {"prompt": f"{about}, {about},", "stop": ".", **asked}
    kind = "completions" if number % 4 == 2 else "chat/completions"
    return {"custom_id": f"q{number}", "method": "POST", "url": f"/v1/{kind}", "body": body}


class Run:
    """One process of the command."""

    def __init__(self, swarm: LocalSwarm, folder: Path, output: str) -> None:
        self.output = folder / output
        files = ("--input", str(folder / "in.jsonl"), "--output", str(self.output))
        asked = ("--model", MODEL, "--dtype", "float32", "--concurrency", "6", *files)
        self._log = (folder / "log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bloombee.cli.batch", *asked, "--initial-peers"]
            + swarm.initial_peers,
            cwd=ROOT,
            stderr=self._log,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def wait_lines(self, count: int) -> None:
        """Until so many lines are answered."""

        def are_there() -> bool:
            assert self.process.poll() is None, self.output.with_name("log").read_text()
            return len(self.lines()) >= count

        wait_until(are_there, ANSWER_S)

    def lines(self) -> list[bytes]:
        if not self.output.exists():
            return []
        return [each for each in self.output.read_bytes().splitlines(keepends=True) if each]

    def answers(self) -> dict[int, Any]:
        """Choices and custom id by line; asserts that none comes twice."""
        read = [json.loads(each) for each in self.lines()]
        numbers = [each["line"] for each in read]
        assert len(set(numbers)) == len(numbers)
        return {
            each["line"]: (each["custom_id"], each["response"]["body"]["choices"]) for each in read
        }


def scores_apart(answers: dict[int, Any]) -> dict[int, Any]:
    """Without log-probabilities, whose last digit may depend on who shares a pass."""
    return {
        number: (name, [{**choice, "logprobs": None} for choice in choices])
        for number, (name, choices) in answers.items()
    }


def test_killed_twice_and_a_server_once(swarm: LocalSwarm, tmp_path: Path) -> None:
    lines = [json.dumps(line(number)) for number in range(LINES)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with Run(swarm, tmp_path, "undisturbed.jsonl") as undisturbed:
        assert undisturbed.process.wait(ANSWER_S) == 0
    expected = undisturbed.answers()
    assert sorted(expected) == list(range(1, LINES + 1))
    with Run(swarm, tmp_path, "out.jsonl") as run:
        run.wait_lines(8)
    assert run.process.returncode == -signal.SIGKILL
    with Run(swarm, tmp_path, "out.jsonl") as run:
        run.wait_lines(15)
        swarm.kill(1)
        swarm.restart(1)
        run.wait_lines(23)
    assert run.process.returncode == -signal.SIGKILL
    with Run(swarm, tmp_path, "out.jsonl") as run:
        assert run.process.wait(ANSWER_S) == 0, (tmp_path / "log").read_text()
    assert scores_apart(run.answers()) == scores_apart(expected)
    assert not (tmp_path / "out.jsonl.errors").exists()
    wait_free(swarm)


def test_ctrl_c_ends_it_with_what_is_finished(swarm: LocalSwarm, tmp_path: Path) -> None:
    texts = [{"prompt": f"Say {number}", "max_tokens": 5} for number in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, texts)))
    with Run(swarm, tmp_path, "out.jsonl") as run:
        run.wait_lines(3)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(20) == 130
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert log.rstrip().endswith("interrupted; the same command goes on where it ended")
    assert 3 <= len(run.answers()) < 200
    wait_free(swarm)
