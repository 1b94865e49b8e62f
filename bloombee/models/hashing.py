"""SHA-256 of weight files: in threads, with progress, and never twice for the same file."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bloombee.config.directories import cache_directory
from bloombee.models.cache_folder import file_key, write_atomically
from bloombee.telemetry import Progress

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
THREADS = 4
# Smaller files are hashed faster than their hash is found again.
KEPT_FROM_BYTES = 16 << 20
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


def sha256_of(paths: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file, under its key. Writes new ones to the user's cache folder."""
    size_bytes = sum(path.stat().st_size for path in paths.values())
    with (
        Progress("Hashing weights", size_bytes) as progress,
        ThreadPoolExecutor(THREADS, thread_name_prefix="hash") as pool,
    ):
        digests = pool.map(partial(_sha256, progress=progress), paths.values())
        return dict(zip(paths, digests, strict=True))


def _sha256(path: Path, *, progress: Progress) -> str:
    # The Hugging Face cache names large files by their SHA-256 and links to them.
    real = path.resolve()
    if _SHA256_NAME.fullmatch(real.name):
        progress.advance(real.stat().st_size)
        return real.name
    if real.stat().st_size < KEPT_FROM_BYTES:
        return _read_through(real, progress)
    record = cache_directory() / "sha256" / f"{file_key(real)}.json"
    if (known := _known(record)) is not None:
        progress.advance(real.stat().st_size)
        return known
    digest = _read_through(real, progress)
    write_atomically(record, json.dumps({"path": str(real), "sha256": digest}))
    return digest


def _read_through(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def _known(record: Path) -> str | None:
    try:
        return str(json.loads(record.read_text())["sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s is unreadable (%s): hashing again", record, error)
        return None
