"""A batch job that is killed twice and loses a server on the way: is every line answered once?

Three servers, `--lines` prompts of many lengths, greedy and sampled. First an undisturbed
run of `bloombee-batch`; then one that is killed (-9) after a quarter of the lines, started
again, loses a server (-9, restarted at once) after half of them, is killed again
after three quarters, and goes on to the end. Prints tokens/s and lines asked twice; the
exit code is 1 when a line is missing, answered twice, or answered differently.

    python benchmarks/batch_jobs.py [--lines 500] [--new 32] [--model smollm2] [--concurrency 48]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.economy import Economy, add_flags, economy_line
from bloombee.cli.local_swarm import LocalSwarm, equal_spans
from bloombee.models import open_source
from bloombee.telemetry import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SERVERS = 3
LOOK_S = 0.1
WORDS = ("bees", "rivers", "clocks", "bread", "maps", "violins", "glass", "salt", "wool", "ash")
console = Console(width=120)


@dataclass(frozen=True)
class Answer:
    """What the output says of one line."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Bench:
    """A swarm, and a folder with the input."""

    swarm: LocalSwarm
    folder: Path
    flags: tuple[str, ...]

    @contextmanager
    def run(self, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """One process of the command; killed (-9) where the block is left before it ended."""
        files = ("--input", str(self.folder / "in.jsonl"), "--output", str(output))
        words = [*self.flags, *files, "--initial-peers", *self.swarm.initial_peers]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bloombee.cli.batch", *words], stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def wait_lines(self, process: subprocess.Popen[bytes], output: Path, count: int) -> None:
        """Until `output` has so many lines. Raises RuntimeError when the process ended before."""
        while count_lines(output) < count:
            if process.poll() is not None and count_lines(output) < count:
                raise RuntimeError(f"it ended with {process.returncode}:\n{self.log()}")
            threading.Event().wait(LOOK_S)

    def log(self) -> str:
        """The last lines of what the runs said."""
        return "\n".join((self.folder / "log").read_text().splitlines()[-20:])


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description="A batch job, killed and resumed.")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, default=48)
    add_flags(parser)
    asked = parser.parse_args()
    machine = Economy.of(asked)
    spans = equal_spans(open_source(asked.model).num_blocks, SERVERS)
    flags = ("--model", asked.model, "--dtype", "float32")
    flags += ("--concurrency", str(asked.concurrency), "--max-new-tokens", str(asked.new))
    with (
        tempfile.TemporaryDirectory(prefix="bloombee-batch-") as folder,
        LocalSwarm(
            asked.model, spans, server_flags=("--dtype", "float32", "--threads", "1")
        ) as swarm,
    ):
        bench = Bench(swarm, Path(folder), flags)
        lines = [json.dumps(prompt(number)) for number in range(asked.lines)]
        (bench.folder / "in.jsonl").write_text("\n".join(lines))
        plain = undisturbed(bench)
        console.print(economy_line(plain.tokens_per_s, machine))
        return report(plain, disturbed(bench, asked.lines), asked.lines)


def prompt(number: int) -> dict[str, Any]:
    """Line `number`: a chat of a few to a hundred words; every third is sampled."""
    draw = random.Random(number)
    words = " ".join(draw.choices(WORDS, k=draw.choice((3, 10, 30, 100))))
    messages = [{"role": "user", "content": f"What have these in common: {words}?"}]
    sampled = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
    return {"custom_id": f"q{number}", "messages": messages, **sampled}


@dataclass(frozen=True)
class Job:
    """Answers to all lines, in how many seconds and runs; `repeated` lines come twice."""

    answers: dict[int, Answer]
    repeated: int
    seconds: float
    runs: int

    @property
    def tokens_per_s(self) -> float:
        """Of the answers, over all of the time, starts included."""
        return sum(answer.tokens for answer in self.answers.values()) / self.seconds


def undisturbed(bench: Bench) -> Job:
    """All lines in one run."""
    output, watch = bench.folder / "undisturbed.jsonl", Stopwatch()
    finish(bench, output)
    return job(output, watch.elapsed_s, 1)


def disturbed(bench: Bench, lines: int) -> Job:
    """All lines in three runs and a server's death."""
    output, watch = bench.folder / "out.jsonl", Stopwatch()
    with bench.run(output) as process:
        bench.wait_lines(process, output, lines // 4)
    console.print(f"killed at {count_lines(output)} lines")
    with bench.run(output) as process:
        bench.wait_lines(process, output, lines // 2)
        bench.swarm.kill(1)
        console.print(f"a server killed at {count_lines(output)} lines")
        bench.swarm.restart(1)
        bench.wait_lines(process, output, lines * 3 // 4)
    console.print(f"killed at {count_lines(output)} lines")
    finish(bench, output)
    return job(output, watch.elapsed_s, 3)


def finish(bench: Bench, output: Path) -> None:
    """Run it to its end. Raises RuntimeError when that is not a good one."""
    with bench.run(output) as process:
        if process.wait() != 0:
            raise RuntimeError(f"it ended with {process.returncode}:\n{bench.log()}")


def job(output: Path, seconds: float, runs: int) -> Job:
    """What an output holds."""
    read = [json.loads(line) for line in output.read_text().splitlines()]
    answers = {each["line"]: answer(each["response"]["body"]) for each in read}
    return Job(answers, len(read) - len(answers), seconds, runs)


def answer(body: dict[str, Any]) -> Answer:
    """The first choice of a chat completion."""
    return Answer(body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"])


def count_lines(output: Path) -> int:
    """Whole lines that are there."""
    return output.read_bytes().count(b"\n") if output.exists() else 0


def report(plain: Job, hurt: Job, lines: int) -> int:
    """Print the figures; 1 when a line is missing, twice or different."""
    table = Table(title=f"{lines} lines")
    for column in ("", "runs", "answered", "twice", "different", "seconds", "tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    different = [n for n, found in hurt.answers.items() if plain.answers.get(n) != found]
    rows: Sequence[tuple[str, Job, int]] = (
        ("undisturbed", plain, 0),
        ("killed twice, a server once", hurt, len(different)),
    )
    for name, each, wrong in rows:
        counts = (each.runs, len(each.answers), each.repeated, wrong)
        rates = (f"{each.seconds:.1f}", f"{each.tokens_per_s:.1f}")
        table.add_row(name, *map(str, counts), *rates)
    console.print(table)
    complete = len(plain.answers) == len(hurt.answers) == lines
    return 0 if complete and not different and not hurt.repeated and not plain.repeated else 1


if __name__ == "__main__":
    sys.exit(main())
