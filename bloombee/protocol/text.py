"""Text from the other side, made fit for one line of a log or a terminal."""

from __future__ import annotations


def one_line(text: str, limit: int = 500) -> str:
    """`text` without control characters and line breaks, cut to `limit` characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(each if each.isprintable() else " " for each in cut)
