"""A swarm of processes on this machine: what the demo, the benchmarks and tests start.

Every child is a real console script, started as a user would, and is ended by
pid when the block is left, whatever happened inside it; on Linux also when the
thread that started it ends without leaving the block.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bloombee.errors import SwarmError
from bloombee.swarm import tether

Report = Callable[[str], None]
_POLL_S = 0.05
_TAIL_LINES = 12
_TETHERED = (sys.executable, "-I", "-S", str(tether.__file__), "signal")


@dataclass(frozen=True, slots=True)
class Ready:
    """What a child wrote into its ready file, and how long it took to."""

    peer: str
    maddrs: tuple[str, ...]
    pid: int
    endpoint: str
    span: str
    start_s: float


class Child:
    """One console script of ours, its log, and its ready file."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.json"
        self._started = time.monotonic()
        command = [sys.executable, "-m", module, *arguments, "--ready-file", str(self._ready_file)]
        if sys.platform == "linux":  # else a killed parent leaves them running
            command = [*_TETHERED, str(os.getpid()), "-1", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self, deadline_s: float) -> Ready:
        """Block until the ready file is there.

        Raises SwarmError with the log's last lines when the child ends before, or
        takes longer than `deadline_s`.
        """
        until = self._started + deadline_s
        while not self._ready_file.exists():
            if self._ended(_POLL_S):
                raise SwarmError(
                    f"{self.name} ended with code {self.process.returncode}:\n{self.tail()}"
                )
            if time.monotonic() > until:
                raise SwarmError(f"{self.name} was not ready in {deadline_s:.0f} s:\n{self.tail()}")
        took = time.monotonic() - self._started
        told = json.loads(self._ready_file.read_text())
        return Ready(
            peer=told["peer"],
            maddrs=tuple(told["maddrs"]),
            pid=told["pid"],
            endpoint=told.get("endpoint", ""),
            span=told.get("span", ""),
            start_s=took,
        )

    def tail(self) -> str:
        """The last lines the child printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def signal_stop(self) -> None:
        """Ask the child to stop; does not wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def finish(self, grace_s: float) -> None:
        """Wait for the child to end, and kill it after `grace_s`."""
        if not self._ended(grace_s):
            self.process.kill()
            self.process.wait()

    def _ended(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class LocalSwarm:
    """`bloombee-dht` and one `bloombee-server` for each span, on 127.0.0.1.

    Use as a context manager. Entering raises SwarmError, with the last lines of
    the child's log, when one does not come up; leaving ends all children.
    """

    def __init__(
        self,
        model: str,
        spans: Sequence[str],
        *,
        server_flags: Sequence[str] = (),
        deadline_s: float = 300.0,
        report: Report = lambda _: None,
    ) -> None:
        self.model = model
        self.spans = tuple(spans)
        self.children: list[Child] = []
        self.dht: Ready | None = None
        self.servers: tuple[Ready, ...] = ()
        self._server_flags = tuple(server_flags)
        self._deadline_s = deadline_s
        self._report = report
        self._stack = ExitStack()

    @property
    def initial_peers(self) -> list[str]:
        """Multiaddresses to join the swarm by."""
        return list(self.dht.maddrs) if self.dht else []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bloombee-")))
            stack.callback(self._stop)
            self._start(folder)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, folder: Path) -> None:
        self._report("starting the DHT")
        local = ("--host", "127.0.0.1")
        dht = Child("dht", "bloombee.cli.dht", (*local, "--dht-port", "0"), folder)
        self.children.append(dht)
        self.dht = dht.wait_ready(self._deadline_s)
        self._report(f"starting {len(self.spans)} servers")
        for index, span in enumerate(self.spans):
            flags = ("--model", self.model, "--blocks", span, "--initial-peers", *self.dht.maddrs)
            self.children.append(
                Child(
                    f"server-{index}",
                    "bloombee.cli.server",
                    (*flags, *local, *self._server_flags),
                    folder,
                )
            )
        ready = list[Ready]()
        for child in self.children[1:]:
            ready.append(child.wait_ready(self._deadline_s))
            self._report(f"{len(ready)} of {len(self.spans)} servers ready ({ready[-1].span})")
        self.servers = tuple(ready)

    def _stop(self) -> None:
        for child in reversed(self.children):
            child.signal_stop()
        for child in reversed(self.children):
            child.finish(grace_s=6.0)


def equal_spans(blocks: int, servers: int) -> list[str]:
    """`servers` spans as equal as can be over `blocks` blocks, as `START:END`.

    Raises ValueError when there are more servers than blocks, or none.
    """
    if not 1 <= servers <= blocks:
        raise ValueError(f"{blocks} blocks can't be shared among {servers} servers")
    cuts = [blocks * index // servers for index in range(servers + 1)]
    return [f"{start}:{end}" for start, end in zip(cuts, cuts[1:], strict=False)]
