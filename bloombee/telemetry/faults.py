"""Whose fault an exception is that nobody awaited."""

from __future__ import annotations

import traceback

_PACKAGE = __name__.partition(".")[0] + "."


def is_ours(error: BaseException) -> bool:
    """Whether code of this package was running when `error` was raised."""
    return any(
        str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
