"""Whether a server should move to other blocks, and whether it may: pure policy over records.

All that is decided here follows from what servers have published, so that those who see
the same decide the same, without a leader:

1. `next_move` names the one server whose move is due, and where to. A block that nobody
   holds comes first. Else the fewest moves, each the best there is, that raise what the
   weakest block can serve by `MovePolicy.gain`: the first of these. Nobody moves while
   another server is choosing or moving.
2. That server announces where it will go, and waits until all can know. `judge` then
   says whether it goes, yields to another that has announced as well, or waits for one
   that has to yield. Whoever sees its own announcement crossed by another counts the
   other as gone already: whatever their views, two servers never leave a block alone.

What a block can serve is the sum of the rates of those who hold it: tokens a second, at
most those of the sequences that their KV admits (Little's law).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bloombee.planner.shifts import Shift, Shifts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from bloombee.core import PeerId, Span

    Floats = NDArray[np.float64]

SESSION_TOKENS = 1024
"""KV that a sequence is taken to reserve, where only a pool's size is known."""
HOP_S = 0.05
"""What a hop is taken to cost a token."""
MOVING_S = 1800.0
"""For a server that moves to load what it goes to, while no other begins to."""
LADDER = 1.1
"""By what share a target is raised while as few moves reach it."""


class Listed(Protocol):
    """What the policy reads of a server's record; `state` as in `swarm.records`."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def span(self) -> Span: ...
    @property
    def next_span(self) -> Span | None: ...
    @property
    def state(self) -> str: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def moved_at_s(self) -> float: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def throughput_tokens_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A `Listed` server by itself, where there is no record of it."""

    peer: PeerId
    span: Span
    throughput_tokens_per_s: float
    kv_tokens: int = 1 << 20
    state: str = "online"
    next_span: Span | None = None
    pinned: bool = False
    moved_at_s: float = 0.0

    @classmethod
    def of(cls, record: Listed, next_span: Span | None) -> Server:
        """What `record` says, with another announcement."""
        return cls(
            peer=record.peer,
            span=record.span,
            throughput_tokens_per_s=record.throughput_tokens_per_s,
            kv_tokens=record.kv_tokens,
            state=record.state,
            next_span=next_span,
            pinned=record.pinned,
            moved_at_s=record.moved_at_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePolicy:
    """When a move is worth its cost.

    `gain`: by what share it raises the swarm's throughput, within `most_moves` moves.
    One that has moved stays for `cooldown_s`, unless a block has no holder.
    """

    gain: float = 0.2
    cooldown_s: float = 300.0
    most_moves: int = 4


@dataclass(frozen=True, slots=True)
class Move:
    """`peer` leaves `span` for `to`. `gain`: what the weakest block serves then over now.

    `closes` blocks that nobody holds; the gain is infinite then. Where several moves are
    needed it is the gain of all of them.
    """

    peer: PeerId
    span: Span
    to: Span
    gain: float
    closes: int = 0


class Verdict(StrEnum):
    """What becomes of an announced move."""

    GO = "go"
    WAIT = "wait"
    """Another server has to yield first."""
    YIELD = "yield"


def rates(records: Sequence[Listed], num_blocks: int) -> Floats:
    """Tokens a second that each server gives to each of its blocks.

    Those that have not measured yet count as the median of those that have.
    """
    widths = np.array([len(record.next_span or record.span) for record in records], float)
    held = np.array([len(record.span) for record in records], float)
    told = np.array([record.throughput_tokens_per_s for record in records], float)
    kv_tokens = np.array([record.kv_tokens for record in records], float)
    known = told > 0
    if not known.any():
        return np.ones(len(records))
    block_s = np.where(known, 1 / (np.where(known, told, 1.0) * held), np.nan)
    typical_s = float(np.nanmedian(block_s))
    computed = 1 / (np.where(known, block_s, typical_s) * widths)
    hops = num_blocks / float(np.median(held[known]))
    sequence_s = num_blocks * typical_s + hops * HOP_S
    return np.minimum(computed, kv_tokens / SESSION_TOKENS / sequence_s)


def planned_span(record: Listed) -> Span | None:
    """The blocks that a server holds, or will: None for one that goes for good or chooses."""
    if record.state in ("online", "joining") or record.next_span is not None:
        return record.next_span or record.span
    return None


def is_holder(record: Listed) -> bool:
    """Whether a server serves its blocks and has not announced that it will leave them."""
    return record.state == "online" and record.next_span is None


def supply(records: Sequence[Listed], num_blocks: int) -> Floats:
    """Tokens a second that each block can serve once all that is announced has happened."""
    return _laid_out(records, rates(records, num_blocks), num_blocks)


def _laid_out(records: Sequence[Listed], weights: Floats, num_blocks: int) -> Floats:
    """What each block gets when each server gives its weight to those it will hold."""
    total = np.zeros(num_blocks)
    for record, weight in zip(records, weights, strict=True):
        if (span := planned_span(record)) is not None:
            total[span.start : span.end] += weight
    return total


def holders(records: Iterable[Listed], num_blocks: int) -> NDArray[np.int64]:
    """How many servers hold each block and stay."""
    count = np.zeros(num_blocks, np.int64)
    for record in records:
        if is_holder(record):
            count[record.span.start : record.span.end] += 1
    return count


def opens_gap(records: Iterable[Listed], move: Move, num_blocks: int) -> bool:
    """Whether a block that the mover leaves has no other server that holds it and stays."""
    others = holders((r for r in records if r.peer != move.peer), num_blocks)
    left = [block for block in range(move.span.start, move.span.end) if block not in move.to]
    return any(others[block] == 0 for block in left)


def next_move(
    records: Iterable[Listed],
    num_blocks: int,
    now_s: float,
    policy: MovePolicy = MovePolicy(),  # noqa: B008 - frozen
) -> Move | None:
    """The move that is due, or None. Ties go to the lowest peer id, then the lowest block."""
    ordered = sorted(records, key=lambda record: record.peer)
    if any(_is_unsettled(record) for record in ordered):
        return None
    free = [i for i, record in enumerate(ordered) if is_holder(record) and not record.pinned]
    if not free:
        return None
    held = holders(ordered, num_blocks)
    rate = rates(ordered, num_blocks)
    total = _laid_out(ordered, rate, num_blocks)
    planned = _laid_out(ordered, np.ones(len(ordered)), num_blocks)
    if not planned.all():
        spans = [ordered[i].span for i in free]
        step = Shifts(spans, np.ones(len(free)), planned, held).best(1.0, total, rate[free])
        return None if step is None else _closing(ordered[free[step.index]], step)
    if any(_still_moves(record, now_s) for record in ordered):
        return None
    rested = [i for i in free if now_s - ordered[i].moved_at_s >= policy.cooldown_s]
    if not rested:
        return None
    shifts = Shifts([ordered[i].span for i in rested], rate[rested], total, held)
    found = _fewest(shifts, policy)
    if found is None:
        return None
    first, lowest = found
    mover = ordered[rested[first.index]]
    return Move(mover.peer, mover.span, first.to, lowest / float(total.min()))


def _is_unsettled(record: Listed) -> bool:
    """Whether it is not known yet where this server will be, or that it really goes."""
    return record.state == "choosing" or record.next_span is not None


def _still_moves(record: Listed, now_s: float) -> bool:
    """Whether a server has left its blocks and loads others; not for ever, should it hang."""
    return record.state == "joining" and now_s - record.moved_at_s < MOVING_S


def _closing(mover: Listed, step: Shift) -> Move:
    return Move(mover.peer, mover.span, step.to, float("inf"), round(step.worth))


def _fewest(shifts: Shifts, policy: MovePolicy) -> tuple[Shift, float] | None:
    """The first of the fewest moves that bring enough, and what the weakest block has then."""
    target = enough = shifts.floor * (1 + policy.gain)
    best = shifts.reach(enough, policy.most_moves)
    if best is None:
        return None
    while (higher := shifts.reach(target * LADDER, len(best))) is not None:
        # With each move less is lacking of what is enough: else they could go round.
        if shifts.shifted(higher[0]).lack(enough) >= shifts.lack(enough):
            break
        best, target = higher, target * LADDER
    return best[0], shifts.after(best)


def judge(
    records: Iterable[Listed],
    num_blocks: int,
    now_s: float,
    move: Move,
    policy: MovePolicy = MovePolicy(),  # noqa: B008 - frozen
) -> Verdict:
    """What becomes of `move`, which its server has announced long enough for all to know."""
    records = list(records)
    me = next((record for record in records if record.peer == move.peer), None)
    others = [record for record in records if record.peer != move.peer]
    if me is None or me.next_span != move.to or opens_gap(others, move, num_blocks):
        return Verdict.YIELD
    rivals = [record for record in others if _is_unsettled(record)]
    if any(rival.state != "online" for rival in rivals):
        return Verdict.YIELD
    if rivals:
        quiet = [Server.of(r, None if r.state == "online" else r.next_span) for r in records]
        first = min([me, *rivals], key=lambda record: _precedence(quiet, record, num_blocks))
        return Verdict.WAIT if first is me else Verdict.YIELD
    again = next_move([*others, Server.of(me, None)], num_blocks, now_s, policy)
    is_same = again is not None and (again.peer, again.to) == (move.peer, move.to)
    return Verdict.GO if is_same else Verdict.YIELD


def _precedence(
    quiet: Sequence[Listed], mover: Listed, num_blocks: int
) -> tuple[tuple[float, ...], PeerId]:
    """Least for the announced move that leaves the weakest blocks strongest, if it alone goes."""
    after = [
        Server.of(record, mover.next_span) if record.peer == mover.peer else record
        for record in quiet
    ]
    ascending = np.sort(supply(after, num_blocks))
    return tuple(-float(value) for value in ascending), mover.peer
