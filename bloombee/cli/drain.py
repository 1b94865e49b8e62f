"""`bloombee-server --drain`: tell running servers to hand over, and wait until they are gone."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import psutil

from bloombee.cli.running import RunningServer, running_servers
from bloombee.errors import DeadlineExceeded, SettingsError
from bloombee.telemetry import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Report = Callable[[str], None]

DRAIN_SIGNAL = signal.SIGUSR1
"""Unlike SIGTERM it may come twice: to drain is to end, and a second SIGTERM ends at once."""
LEAVE_S = 10.0
"""What a server may take to leave, over and above its own time for draining."""
_LOOK_S = 0.1
_PROGRESS_S = 5.0


def drain(pid: int | None, report: Report) -> None:
    """Drain the servers of this user on this machine (one of them, with `pid`); wait for all.

    Raises SettingsError when there is none or they are not ours, DeadlineExceeded when
    one is still there after its own time for draining and LEAVE_S.
    """
    servers = _chosen(pid)
    for server in servers:
        _tell(server)
    report(f"draining {_listed(servers)}")
    _wait(servers, report)


def _chosen(pid: int | None) -> list[RunningServer]:
    servers = running_servers()
    if not servers:
        raise SettingsError("--drain: no server of yours runs on this machine")
    if pid is None:
        return servers
    chosen = [server for server in servers if server.pid == pid]
    if not chosen:
        raise SettingsError(f"--pid {pid}: no server of yours; running are {_listed(servers)}")
    return chosen


def _tell(server: RunningServer) -> None:
    process = server.process
    if process is None:
        return
    try:
        process.send_signal(DRAIN_SIGNAL)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        owner = process.username()
        raise SettingsError(
            f"--drain: not permitted to signal pid {server.pid}, which {owner} runs; "
            f"drain it as {owner}"
        ) from None


def _wait(servers: Sequence[RunningServer], report: Report) -> None:
    """Until all are gone, or one takes too long; each end is reported."""
    watch, never = Stopwatch(), threading.Event()
    deadline_s = max(server.drain_s for server in servers) + LEAVE_S
    left = list(servers)
    said_s = 0.0
    while left:
        never.wait(_LOOK_S)
        for server in [server for server in left if server.process is None]:
            left.remove(server)
            said_s = watch.elapsed_s
            report(f"pid {server.pid} is gone after {said_s:.1f} s, {len(left)} left")
        if watch.elapsed_s > deadline_s:
            pids = " ".join(str(server.pid) for server in left)
            raise DeadlineExceeded(
                f"--drain: still there after {deadline_s:.0f} s: {_listed(left)}; "
                f"end them with: kill -9 {pids}"
            )
        if watch.elapsed_s - said_s > _PROGRESS_S:
            said_s = watch.elapsed_s
            report(f"waiting for {_listed(left)}, {said_s:.0f} of {deadline_s:.0f} s")


def _listed(servers: Sequence[RunningServer]) -> str:
    return ", ".join(f"pid {server.pid} ({server.model})" for server in servers)
