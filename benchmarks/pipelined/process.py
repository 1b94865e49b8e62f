"""A client process of the benchmarks, which says when every row has a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.pipelined.client import Answer, First, Job, Request
from benchmarks.process import LineProcess

if TYPE_CHECKING:
    from collections.abc import Callable


class ClientProcess(LineProcess):
    """A swarm client in a process of its own; `prefix` takes it to another host."""

    def __init__(self, job: Job, prefix: tuple[str, ...] = ()) -> None:
        super().__init__("benchmarks.pipelined.client", job, prefix)

    def ask(self, request: Request, at_first: Callable[[First], None] | None = None) -> Answer:
        """Run a request; `at_first` is called once every row has a token."""
        self.write(request)
        first = self.read(First)
        if at_first is not None:
            at_first(first)
        return self.read(Answer)
