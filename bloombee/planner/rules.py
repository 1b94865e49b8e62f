"""Rules of placement to compare in `churn`: ours, none that moves, and Petals' greedy one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bloombee.core import PeerId, Span
from bloombee.planner.moves import Move, MovePolicy, Server, next_move
from bloombee.planner.placement import choose_span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bloombee.planner.churn import Resident, World


_NOTHING = 1e-6
"""Tokens a second that are only rounding."""


@dataclass(slots=True)
class Ours:
    """What servers do: `choose_span`, and one announced move at a time by `next_move`.

    `draw` gives numbers in [0, 1): how long the mover takes to notice that it is its turn.
    Afterwards it looks again, waits until its word can be known, and looks a third time.
    """

    draw: Callable[[], float]
    policy: MovePolicy = MovePolicy()
    every_s: float = 30.0
    settle_s: float = 5.0
    drain_s: float = 15.0
    name: str = "ours"
    moves_at_all: bool = True
    _seen: int = field(default=-1, init=False)
    _asked_s: float = field(default=-1e9, init=False)
    _due: tuple[Move, float] | None = field(default=None, init=False)

    def place(self, world: World, width: int) -> Span:
        """Where the weakest blocks become strongest."""
        return choose_span(world.num_blocks, width, world.planned.round(6).tolist())

    def moves(self, world: World) -> Sequence[tuple[Resident, Span]]:
        """The one move that is due, has been for long enough, and is still."""
        if not self.moves_at_all:
            return ()
        if self._due is not None:
            move, at_s = self._due
            if world.now_s < at_s:
                return ()
            self._due = None
            if self._next(world) == move:
                return ((world.residents[move.peer], move.to),)
        elif self._is_worth_asking(world) and (move := self._next(world)) is not None:
            wait_s = self.every_s * self.draw() + self.settle_s * (1 + self.draw())
            self._due = move, world.now_s + wait_s
        return ()

    def _is_worth_asking(self, world: World) -> bool:
        """Whether anything has changed, or rested, since there was nothing to do."""
        changed = world.version != self._seen or world.now_s - self._asked_s > 60.0
        if changed:
            self._seen, self._asked_s = world.version, world.now_s
        return changed

    def _next(self, world: World) -> Move | None:
        servers = [
            Server(
                peer=PeerId(name),
                span=one.span,
                throughput_tokens_per_s=one.about.tokens_per_s,
                state="online" if one.serves else "joining",
                next_span=one.to,
                moved_at_s=one.moved_at_s,
            )
            for name, one in world.residents.items()
        ]
        return next_move(servers, world.num_blocks, world.now_s, self.policy)


@dataclass(slots=True)
class Greedy:
    """Petals' rule as it is described (Borzunov et al., 2023, 3.2 and appendix).

    A newcomer takes the window of least throughput. Each server checks about once in
    `every_s` by itself: if the weakest block would serve `gain` more with it elsewhere,
    it leaves at once and loads the other blocks. Where blocks are missing, it counts as a
    gain already that fewer are; and all see at once what others have decided.
    """

    draw: Callable[[int], np.ndarray[tuple[int], np.dtype[np.float64]]]
    tick_s: float
    gain: float = 0.2
    every_s: float = 60.0
    drain_s: float = 0.0
    name: str = "Petals' greedy rule"

    def place(self, world: World, width: int) -> Span:
        """The window whose weakest block is weakest, of those the one that has least."""
        return _weakest_window(world.planned, width)

    def moves(self, world: World) -> Sequence[tuple[Resident, Span]]:
        """Those whose turn it is to check, and who would gain enough."""
        able = [one for one in world.residents.values() if one.serves and one.to is None]
        turns = self.draw(len(able)) < self.tick_s / self.every_s
        found: list[tuple[Resident, Span]] = []
        planned = world.planned.copy()
        for one in (one for one, is_its in zip(able, turns, strict=True) if is_its):
            rate, now = one.about.tokens_per_s, float(planned.min())
            if rate <= now * self.gain:  # it can't raise the weakest by so much
                continue
            without = planned.copy()
            without[one.span.start : one.span.end] -= rate
            to = _weakest_window(without, len(one.span))
            without[to.start : to.end] += rate
            missing = int((planned < _NOTHING).sum())
            better = float(without.min()) > now * (1 + self.gain) + _NOTHING
            if to != one.span and (better or int((without < _NOTHING).sum()) < missing):
                found.append((one, to))
                planned = without
        return found


def _weakest_window(supply: np.ndarray[tuple[int], np.dtype[np.float64]], width: int) -> Span:
    windows = np.lib.stride_tricks.sliding_window_view(supply, min(width, len(supply)))
    start = int(np.lexsort((windows.sum(axis=1), windows.min(axis=1)))[0])
    return Span(start, start + windows.shape[1])
