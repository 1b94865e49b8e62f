"""One console script of ours as a child process: started, signalled, started again.

On Linux a child also ends when the thread that started it ends, however it does:
start children in a thread that lives as long as they are to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.errors import SwarmError
from bloombee.swarm import tether

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_POLL_S = 0.05
_TAIL_LINES = 12
_TETHERED = (sys.executable, "-I", "-S", str(tether.__file__), "signal")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a child runs: the address it listens on, and the command that takes it there.

    `prefix` begins with an absolute path (`/usr/bin/nsenter`), or is empty. `flags` are
    for a server there, beside those of all.
    """

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


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
    """A console script, its log, and its ready file; starts when it is made."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], folder: Path, place: Place
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.json"
        self._command = [*place.prefix, sys.executable, "-m", module, *arguments]
        self._command += ["--ready-file", str(self._ready_file)]
        if sys.platform == "linux":  # else a killed parent leaves them running
            self._command = [*_TETHERED, str(os.getpid()), "-1", *self._command]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

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

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, if it still runs; does not wait."""
        if self.is_running:
            self.process.send_signal(signum)

    def kill(self) -> None:
        """End the process at once, without a chance to clean up, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again with the same flags, after ending it if it still runs; does not wait."""
        self.kill()
        self._ready_file.unlink(missing_ok=True)
        self.process = self._start()

    def signal_stop(self) -> None:
        """Ask the child to stop, also if it is frozen; does not wait."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def finish(self, grace_s: float) -> None:
        """Wait for the child to end, and kill it after `grace_s`."""
        if not self._ended(grace_s):
            self.kill()

    def _ended(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
