"""What can be worked out again (hashes, converted GGUF metadata), kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from bloombee.config.directories import cache_directory

log = logging.getLogger(__name__)


def file_key(path: Path) -> str:
    """Names a file's content without reading it: path, size and modification time."""
    status = path.stat()
    key = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(key.encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a cache file that no reader ever sees half of. A full or read-only disk only warns."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("can't cache %s: %s", path, error)


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The cached folder `kind/key`, which `build` fills when it does not exist yet.

    Several processes may build at once; the first to finish wins. Where the cache can't
    be written the folder is a temporary one that lasts as long as the process.
    """
    folder = cache_directory() / kind / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        log.warning("can't cache in %s: %s", folder.parent, error)
        new = folder = Path(_temporary().name) / key
        if new.is_dir():
            return new
        new.mkdir()
    try:
        build(new)
        if new != folder:
            _move(new, folder)
    except BaseException:
        shutil.rmtree(new)
        raise
    return folder


def _move(new: Path, folder: Path) -> None:
    try:
        new.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(new)  # another process was first


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bloombee-")
