"""What a system that is compared has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    import psutil

    from benchmarks.pipelined.client import Answer
    from bloombee.cli.child import Place


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy tokens for distinct random prompts."""

    batch: int
    prompt: int
    new: int

    def __str__(self) -> str:
        return f"batch {self.batch}, prompt {self.prompt}, {self.new} new"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a system runs: places of the client and then of each server, and their spans.

    `model` is a folder with config and safetensors; logs go to `logs`.
    """

    places: tuple[Place, ...]
    spans: tuple[str, ...]
    model: Path
    dtype: str
    logs: Path


class Running(Protocol):
    """A system whose servers and client are up."""

    def run(self, workload: Workload) -> Answer:
        """Answer one workload; times are on the machine's monotonic clock."""
        ...

    def processes(self) -> list[psutil.Process]:
        """The servers, without what they started."""
        ...


class System(Protocol):
    """A system that may be compared."""

    name: str

    def obstacle(self) -> str:
        """Why it can't run on this machine, in one line that says how to mend it; or nothing."""
        ...

    def start(self, site: Site, stack: ExitStack, report: Callable[[str], None]) -> Running:
        """Start servers and client; `stack` ends them. Raises SwarmError."""
        ...
