"""Where bloombee keeps files of its own, by each platform's convention."""

from __future__ import annotations

import sys
from pathlib import Path

from bloombee.config.environment import variable

NAME = "bloombee"


def cache_directory() -> Path:
    """For what can be made again (converted weights, measurements). May not exist yet."""
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / NAME
    if sys.platform == "win32":
        return _base("LOCALAPPDATA", "AppData/Local") / NAME / "cache"
    return _base("XDG_CACHE_HOME", ".cache") / NAME


def state_directory() -> Path:
    """For what should last (identities). May not exist yet."""
    if sys.platform == "darwin":
        return _home() / "Library" / "Application Support" / NAME
    if sys.platform == "win32":
        return _base("LOCALAPPDATA", "AppData/Local") / NAME / "state"
    return _base("XDG_STATE_HOME", ".local/state") / NAME


def _base(name: str, fallback: str) -> Path:
    """The folder a variable names; relative ones are ignored, as the XDG rules demand."""
    named = variable(name)
    if named is not None and Path(named).is_absolute():
        return Path(named)
    return _home() / fallback


def _home() -> Path:
    """The user's folder; `/` for a user without one, as in containers; only root writes there."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")
