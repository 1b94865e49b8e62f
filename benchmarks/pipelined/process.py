"""A client process of the benchmarks: started, asked, ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from benchmarks.pipelined.client import Answer, First, Job, Request

if TYPE_CHECKING:
    from collections.abc import Callable


class ClientProcess:
    """A swarm client in a process of its own; `prefix` takes it to another host."""

    def __init__(self, job: Job, prefix: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.pipelined.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the client's pipes were not made")
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self._write(job)
        if (line := self._read()).strip() != "ready":
            raise RuntimeError(f"the client did not load {job}: {line!r}")

    def ask(self, request: Request, at_first: Callable[[First], None] | None = None) -> Answer:
        """Run a request; `at_first` is called once every row has a token."""
        self._write(request)
        first = msgspec.json.decode(self._read(), type=First)
        if at_first is not None:
            at_first(first)
        return msgspec.json.decode(self._read(), type=Answer)

    def _write(self, message: Job | Request) -> None:
        self._requests.write(msgspec.json.encode(message).decode() + "\n")
        self._requests.flush()

    def _read(self) -> str:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the client ended with code {self.process.wait()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self.process.wait(timeout=30)
