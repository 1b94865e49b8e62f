"""A private folder for the sockets of a daemon, gone when the process that uses it is gone.

Each folder holds a file that its process keeps locked. The kernel drops the lock
however the process ends, so the next start can tell stale folders from live ones,
also across PID namespaces that share a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Self

_PREFIX = "bloombee-p2p-"
_LOCK = "lock"


class RuntimeFolder:
    """An empty folder (mode 0700), removed by `remove`, at exit, or by another's next start."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._remove = weakref.finalize(self, _remove, path, lock)

    @classmethod
    def create(cls) -> Self:
        """A new folder; removes what dead processes of this user left behind."""
        remove_stale(Path(tempfile.gettempdir()))
        # The lock is taken before the folder gets the name that sweepers look for.
        draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        lock = os.open(draft / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = draft.with_name(draft.name.removeprefix("."))
        draft.rename(path)
        return cls(path, lock)

    def remove(self) -> None:
        """Delete it and what is in it; may be called twice."""
        self._remove()


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_stale(parent: Path) -> None:
    """Delete the folders in `parent` whose process has ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        # Someone else's, or just removed by another sweeper: not ours to worry about.
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
