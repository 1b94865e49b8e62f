"""How many sequences decode on a server, and how many of them share a pass."""

from __future__ import annotations

from bloombee.core import SessionId
from bloombee.server.live_rows import IDLE_S, LiveRows

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def test_each_pass_takes_the_share_of_the_longest_route() -> None:
    told: list[int | None] = []
    live = LiveRows(told.append)
    live.decoded(A, 8, 1, 0.0)
    assert told == []  # alone on this server, all may go together
    live.decoded(B, 8, 3, 0.0)
    live.decoded(C, 8, 2, 0.0)
    assert live.rows == 24
    assert told == [6, 8]
    live.decoded(C, 8, 2, 1.0)
    assert told == [6, 8]
    live.decoded(C, 5, 2, 1.0)
    assert told == [6, 8, 7]
    live.left(B)
    assert told[-1] == 7 and live.rows == 13
    live.left(C)
    assert told[-1] is None


def test_who_is_idle_counts_no_more() -> None:
    told: list[int | None] = []
    live = LiveRows(told.append)
    live.decoded(A, 4, 2, 0.0)
    live.decoded(B, 4, 2, IDLE_S)
    live.sweep(IDLE_S)
    assert live.rows == 8
    live.sweep(IDLE_S + 0.1)
    assert live.rows == 4 and told == [2, 4, 2]
    live.left(A)
    assert told == [2, 4, 2]
