"""Who moves where, and whether it may: the pure policy, against plain twins of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.core import PeerId, Span
from bloombee.planner.moves import (
    Move,
    MovePolicy,
    Server,
    Verdict,
    holders,
    judge,
    next_move,
    opens_gap,
    rates,
    supply,
)
from bloombee.planner.shifts import Shifts

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW_S = 1e6
POLICY = MovePolicy()


def server(name: str, span: str, tokens_per_s: float = 10.0, **more: Any) -> Server:
    plain = Server(peer=PeerId(name), span=Span.parse(span), throughput_tokens_per_s=tokens_per_s)
    return replace(plain, **more)


def row(*spans: str) -> list[Server]:
    return [server(chr(ord("a") + i), span) for i, span in enumerate(spans)]


def moved(servers: Sequence[Server], move: Move) -> list[Server]:
    return [replace(s, span=move.to) if s.peer == move.peer else s for s in servers]


SPARE = row("0:10", "0:10", "20:30")
"""One server too many for the first blocks, none for those in the middle."""


@pytest.mark.parametrize(
    ("servers", "due"),
    [
        (row("0:10", "10:20", "20:30"), None),  # each is needed
        (row("0:10", "0:10", "10:20", "20:30"), None),  # one too many raises nothing elsewhere
        (row("0:10", "0:10", "20:30"), "a 10:20 closes 10"),
        (row("0:10", "20:30"), None),  # a gap, and nobody to spare
        (row("0:10", "0:10", "10:20", "20:30", "20:30"), None),
        (row("0:10", "0:10", "0:10", "10:20", "20:30", "20:30"), "a 10:20 x2.00"),
        # Only the second of two moves raises the weakest.
        (row("0:10", "0:10", "0:10", "0:10", "10:20", "20:30"), "a 10:20 x2.00"),
        # It is enough to shift.
        (row("0:10", "10:20", "15:25", "16:26"), "c 20:30 closes 4"),
        ([*SPARE, server("d", "0:10", state="joining")], "a 10:20 closes 10"),
        ([*SPARE, server("d", "10:20", state="joining")], None),
        ([*SPARE, server("d", "0:10", state="choosing")], None),
        ([*SPARE, server("d", "0:10", next_span=Span(10, 20))], None),
        ([server("a", "0:10", pinned=True), *SPARE[1:]], "b 10:20 closes 10"),
    ],
)
def test_table(servers: list[Server], due: str | None) -> None:
    move = next_move(servers, 30, NOW_S)
    told = None
    if move is not None:
        gain = f"closes {move.closes}" if move.closes else f"x{move.gain:.2f}"
        told = f"{move.peer} {move.to} {gain}"
    assert told == due


def test_a_gain_below_the_threshold_is_none() -> None:
    servers = [
        server("a", "0:10", 10),
        server("b", "0:10", 1.9),
        server("c", "10:20", 10),
        server("d", "20:30", 20),
    ]
    assert next_move(servers, 30, NOW_S) is None
    assert next_move(servers, 30, NOW_S, MovePolicy(gain=0.1)) is None, "0:10 would be left at 10"
    servers[0] = server("a", "0:10", 12)
    move = next_move(servers, 30, NOW_S, MovePolicy(gain=0.1))
    assert move is not None
    assert (move.peer, move.to, round(move.gain, 2)) == ("b", Span(10, 20), 1.19)
    assert next_move(servers, 30, NOW_S) is None


def test_one_that_has_moved_rests_but_for_a_gap() -> None:
    servers = row("0:10", "0:10", "0:10", "10:20", "20:30", "20:30")
    tired = [replace(s, moved_at_s=NOW_S - 299) for s in servers]
    assert next_move(tired, 30, NOW_S) is None
    assert next_move(tired, 30, NOW_S + 1) is not None
    gap = [s for s in tired if s.peer != "d"]
    assert next_move(gap, 30, NOW_S) is not None


def test_kv_bounds_what_a_server_gives() -> None:
    """A quick one with room for one sequence serves what one sequence asks for."""
    ample, tight = server("a", "0:10", 100), server("b", "0:10", 100, kv_tokens=1024)
    # A token takes 3 x 10 ms of computing, and three hops.
    assert rates([ample, tight], 30).tolist() == pytest.approx([100, 1 / 0.18])
    unknown = server("c", "0:5", 0, state="joining")
    assert rates([ample, unknown], 30).tolist() == pytest.approx([100, 200])


SWARMS = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.booleans()
    ),
    min_size=1,
    max_size=9,
)


def swarm_of(drawn: list[tuple[int, int, int, int, bool]]) -> list[Server]:
    """Servers of a model of ten blocks; few are pinned, joining, or leaving."""
    states = ["online"] * 8 + ["joining", "leaving"]
    return [
        server(
            f"{i}",
            f"{min(start, 10 - width)}:{min(start, 10 - width) + width}",
            float(speed),
            state=states[kind],
            pinned=pinned and speed == 1,
        )
        for i, (start, width, speed, kind, pinned) in enumerate(drawn)
    ]


@given(drawn=SWARMS)
def test_a_move_opens_no_gap_and_everybody_sees_the_same(
    drawn: list[tuple[int, int, int, int, bool]],
) -> None:
    servers = swarm_of(drawn)
    move = next_move(servers, 10, NOW_S)
    assert next_move(servers[::-1], 10, NOW_S) == move
    if move is None:
        return
    mover = next(s for s in servers if s.peer == move.peer)
    assert mover.state == "online" and not mover.pinned and len(move.to) == len(mover.span)
    before, now = holders(servers, 10), holders(moved(servers, move), 10)
    assert ((now > 0) >= (before > 0)).all()
    assert not opens_gap(servers, move, 10)


@given(drawn=SWARMS)
def test_a_swarm_that_is_left_alone_comes_to_rest(
    drawn: list[tuple[int, int, int, int, bool]],
) -> None:
    servers = swarm_of(drawn)
    before = supply(servers, 10)
    rested = next_move(servers, 10, NOW_S) is None
    for _ in range(40):
        move = next_move(servers, 10, NOW_S)
        if move is None:
            break
        servers = moved(servers, move)
    else:
        pytest.fail("it moves for ever")
    after = supply(servers, 10)
    assert (after == 0).sum() <= (before == 0).sum()
    if not rested and (before > 0).all():
        assert after.min() >= 1.2 * before.min() * (1 - 1e-6)


@given(drawn=SWARMS, target=st.integers(1, 12))
def test_the_best_shift_is_the_best_of_all(
    drawn: list[tuple[int, int, int, int, bool]], target: int
) -> None:
    """All windows of all spans, one by one."""
    servers = [s for s in swarm_of(drawn) if s.state == "online"]
    if not servers:
        return
    speeds = np.array([s.throughput_tokens_per_s for s in servers])
    held, total = np.zeros(10, np.int64), np.zeros(10)
    for each, speed in zip(servers, speeds, strict=True):
        total[each.span.start : each.span.end] += speed
        held[each.span.start : each.span.end] += 1

    def worth(index: int, start: int) -> float:
        span, after, left = servers[index].span, total.copy(), held.copy()
        for row, value in ((after, speeds[index]), (left, 1)):
            row[span.start : span.end] -= value
            row[start : start + len(span)] += value
        if ((left == 0) & (held > 0)).any() or after.min() < total.min():
            return -1.0
        lack = np.maximum(target - total, 0).sum() - np.maximum(target - after, 0).sum()
        return float(lack)

    best = max(
        worth(index, start)
        for index, each in enumerate(servers)
        for start in range(11 - len(each.span))
    )
    found = Shifts([s.span for s in servers], speeds, total, held).best(float(target))
    if best <= 0:
        assert found is None
    else:
        assert found is not None
        assert found.worth == pytest.approx(best)
        assert worth(found.index, found.to.start) == pytest.approx(best)


# Announced moves -----------------------------------------------------------------------------


def announced(servers: Sequence[Server], *moves: Move) -> list[Server]:
    to = {move.peer: move.to for move in moves}
    return [replace(s, next_span=to.get(s.peer, s.next_span)) for s in servers]


def test_a_move_that_is_announced_alone_goes() -> None:
    servers = row("0:10", "0:10", "20:30")
    move = next_move(servers, 30, NOW_S)
    assert move is not None
    assert judge(announced(servers, move), 30, NOW_S, move) is Verdict.GO
    assert judge(servers, 30, NOW_S, move) is Verdict.YIELD, "nobody can have seen it"


def test_of_two_one_waits_for_the_other_to_yield() -> None:
    servers = row("0:10", "0:10", "0:10", "20:30")
    here, there = (Move(PeerId(p), Span(0, 10), Span(10, 20), 1.0) for p in "ab")
    both = announced(servers, here, there)
    assert judge(both, 30, NOW_S, here) is Verdict.WAIT
    assert judge(both, 30, NOW_S, there) is Verdict.YIELD
    assert judge(announced(servers, here), 30, NOW_S, here) is Verdict.GO


@pytest.mark.parametrize(
    "change",
    [
        {"state": "leaving", "next_span": Span(10, 20)},  # it has begun
        {"state": "choosing"},
        {"state": "leaving"},  # and nobody would hold 0:10
        {"span": Span(10, 20)},
    ],
)
def test_what_makes_a_move_yield(change: dict[str, Any]) -> None:
    servers = row("0:10", "0:10", "20:30")
    move = next_move(servers, 30, NOW_S)
    assert move is not None
    seen = announced(servers, move)
    seen[1] = replace(seen[1], **change)
    assert judge(seen, 30, NOW_S, move) is Verdict.YIELD


@given(drawn=SWARMS, first=st.integers(0, 8), second=st.integers(0, 8), to=st.integers(0, 9))
def test_two_that_see_each_other_never_leave_a_block_alone(
    drawn: list[tuple[int, int, int, int, bool]], first: int, second: int, to: int
) -> None:
    """Whatever else they see: here the first doesn't know of some of the others."""
    servers = swarm_of(drawn)
    if first == second or max(first, second) >= len(servers):
        return
    moves = [
        Move(s.peer, s.span, Span(start, start + len(s.span)), 2.0)
        for s in (servers[first], servers[second])
        for start in [min(to, 10 - len(s.span))]
    ]
    if any(servers[i].state != "online" for i in (first, second)):
        return
    seen = announced(servers, *moves)
    views = ([s for i, s in enumerate(seen) if i in (first, second) or i % 2], seen)
    go = [
        move
        for move, view in zip(moves, views, strict=True)
        if judge(view, 10, NOW_S, move) is not Verdict.YIELD
    ]
    before, after = holders(servers, 10), holders(servers, 10)
    for move in go:
        after[move.span.start : move.span.end] -= 1
    left = [b for move in go for b in range(move.span.start, move.span.end) if b not in move.to]
    assert all(after[block] > 0 or before[block] == 0 for block in left)
