"""How long to wait before the next attempt."""

from __future__ import annotations


def doubled(first_s: float, times: int, longest_s: float) -> float:
    """`first_s` doubled so many times, `longest_s` at most."""
    return min(longest_s, first_s * 2 ** min(times, 30))
