"""A process of the benchmarks that is driven by JSON lines: started, asked, ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self, TypeVar

import msgspec

T = TypeVar("T")


class LineProcess:
    """`python -m module`, told its `job`; `prefix` takes it to another host.

    `program` is what runs instead, where that is not this Python.

    Raises RuntimeError when it does not load, and whenever it has ended.
    """

    def __init__(
        self,
        module: str,
        job: msgspec.Struct,
        prefix: tuple[str, ...] = (),
        program: tuple[str, ...] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, *(program or (sys.executable, "-m", module))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError(f"the pipes of {module} were not made")
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self.write(job)
        if (line := self._line()).strip() != "ready":
            raise RuntimeError(f"{module} did not load {job}: {line!r}")

    def write(self, message: msgspec.Struct) -> None:
        """Send one line."""
        self._requests.write(msgspec.json.encode(message).decode() + "\n")
        self._requests.flush()

    def read(self, kind: type[T]) -> T:
        """The next line, which is to be of this kind."""
        return msgspec.json.decode(self._line(), type=kind)

    def _line(self) -> str:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {self.process.wait()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self.process.wait(timeout=30)
