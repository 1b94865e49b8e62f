"""What an emulation that was killed may leave: processes in its hosts. Found by the mark.

Everything else dies with the switch. Processes started through `Place` and `Child` die
with whoever started them; others, such as a daemon that a command left in its
host, live on and hold the namespace.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulation import namespace

_PROC = Path("/proc")
_MARK_FIELDS = 2


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process in a host whose switch is gone."""

    pid: int
    command: str


def started_ticks(pid: int) -> int:
    """When a process began, to tell it from a later one of its number; 0 if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def find() -> list[Leftover]:
    """Processes in hosts of emulations that are no more."""
    by_namespace: dict[str, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended, or is not ours
                by_namespace.setdefault(os.readlink(entry / "ns/net"), []).append(int(entry.name))
    by_namespace.pop(os.readlink("/proc/self/ns/net"), None)
    abandoned = [pids for pids in by_namespace.values() if _is_abandoned(pids[0])]
    return [Leftover(pid, _command(pid)) for pids in abandoned for pid in sorted(pids)]


def end(found: list[Leftover]) -> None:
    """Kill them; their namespaces go with the last one."""
    for each in found:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)


def _is_abandoned(pid: int) -> bool:
    """Whether the namespace of a process carries the mark of a switch that has ended."""
    command = ["nsenter", "-t", str(pid), "-n", "--", "ip", "-d", "link", "show", "dev", "lo"]
    done = subprocess.run(command, capture_output=True, text=True)
    _, found, rest = done.stdout.partition(f"alias {namespace.MARK} ")
    fields = rest.split()
    if not found or len(fields) < _MARK_FIELDS:
        return False
    return started_ticks(int(fields[0])) != int(fields[1])


def _command(pid: int) -> str:
    with suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return "?"
