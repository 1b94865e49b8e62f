"""Which servers of this user run on this machine: a small file for each, in the state folder.

Its process keeps the file locked, and the kernel drops the lock however the process
ends, so files of the dead are told from those of the living and removed. A pid alone
proves nothing: it may have a new owner, or be another container's, so a process
counts only if it also began when its file says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from bloombee.config.directories import state_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = "servers"
_CLOCK_STEP_S = 5.0
"""The system's clock may be set meanwhile, and with it when a process seems to have begun."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One server: what it serves, when its process began, how long it drains at most."""

    pid: int
    began_s: float
    model: str
    drain_s: float

    @property
    def process(self) -> psutil.Process | None:
        """Its process, if that still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.began_s) < _CLOCK_STEP_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


@contextlib.contextmanager
def registered(model: str, drain_s: float) -> Iterator[None]:
    """This process is found by `running_servers` while the block runs.

    Where the state folder can't be written, a warning says so and the block runs all the same.
    """
    folder = state_directory() / _FOLDER
    server = RunningServer(os.getpid(), psutil.Process().create_time(), model, drain_s)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(folder)
            stack.enter_context(_locked_file(folder, server))
        except OSError as error:
            logger.warning("--drain will not find this server: %s: %s", folder, error.strerror)
        yield


@contextlib.contextmanager
def _locked_file(folder: Path, server: RunningServer) -> Iterator[None]:
    path = folder / f"{_prefix()}{server.pid}.json"
    # Locked before it gets the name that others look for.
    draft = folder / f".{path.name}"
    descriptor = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(server)).encode())
        draft.rename(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)


def running_servers() -> list[RunningServer]:
    """The servers of this user on this machine, by pid; files of dead ones are removed."""
    folder = state_directory() / _FOLDER
    _remove_stale(folder)
    read = (_read(path) for path in folder.glob(f"{_prefix()}*.json"))
    found = [server for server in read if server is not None and server.process is not None]
    return sorted(found, key=lambda server: server.pid)


def _prefix() -> str:
    """Home folders may be shared by machines; pids are not."""
    return f"{socket.gethostname()}-"


def _read(path: Path) -> RunningServer | None:
    try:
        told = json.loads(path.read_bytes())
        return RunningServer(
            int(told["pid"]), float(told["began_s"]), str(told["model"]), float(told["drain_s"])
        )
    except FileNotFoundError:
        return None  # it has just ended
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("%s says nothing about a server: %r", path, error)
        return None


def _remove_stale(folder: Path) -> None:
    """Remove the files whose process has ended."""
    for path in folder.glob(f"{_prefix()}*.json"):
        # Someone else's, locked, or just removed by another: not ours to worry about.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    path.unlink()
            finally:
                os.close(descriptor)
