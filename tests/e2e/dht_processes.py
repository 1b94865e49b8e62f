"""Starting the processes of the DHT tests and waiting for what they do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bloombee.cli.child import Place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

ROOT = Path(__file__).parents[2]
START_S = 40.0
HERE = Place()
SHIFTED_CLOCK = "import time; real = time.time; time.time = lambda: real() + {shift}; "


@dataclass(frozen=True)
class Running:
    """A process that wrote its ready file."""

    process: subprocess.Popen[str]
    maddrs: tuple[str, ...]

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def spawn(*arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def running(*arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[Running]:
    """A Python process that gets a ready file as READY_FILE; killed at the end if it still runs.

    `prefix` is a command that takes it to where it is to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        words = (word.replace("READY_FILE", str(ready)) for word in arguments)
        process = spawn(*words, prefix=prefix)
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None, START_S)
            assert process.poll() is None, process.communicate()[1]
            yield Running(process, tuple(json.loads(ready.read_text())["maddrs"]))
        finally:
            process.kill()
            process.communicate()


def bootstrap(*flags: str, place: Place = HERE) -> contextlib.AbstractContextManager[Running]:
    flags = (*flags,) if "--dht-port" in flags else ("--dht-port", "0", *flags)
    local = ("--host", place.host, "--ready-file", "READY_FILE")
    return running("-m", "bloombee.cli.dht", *local, *flags, prefix=place.prefix)


def member(
    peers: tuple[str, ...],
    lifetime_s: float = 30.0,
    refresh_s: float = 10.0,
    place: Place = HERE,
) -> contextlib.AbstractContextManager[Running]:
    words = ("READY_FILE", str(lifetime_s), str(refresh_s), place.host, *peers)
    return running("-m", "tests.e2e.dht_member", *words, prefix=place.prefix)


def wait_until(happened: Callable[[], bool], deadline_s: float) -> float:
    """Block until it happened; returns how long it took. Fails after the deadline."""
    started = time.monotonic()
    pause = threading.Event()
    while not happened():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s} s"
        pause.wait(0.02)
    return time.monotonic() - started


async def eventually(happened: Callable[[], Awaitable[bool]], deadline_s: float) -> float:
    """The same for questions that are awaited."""
    started = time.monotonic()
    while not await happened():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - started
