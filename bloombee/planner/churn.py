"""A swarm over hours in virtual time: servers come, load, serve, move and vanish.

Events are arrivals, ends of loading, ends of draining and deaths; between two of them
nothing changes, so what is served is summed up exactly. A `Rule` places newcomers and is
asked every `TICK_S` who moves. The tokens per second of the swarm are those of its weakest
block (`moves.supply`); with a block that nobody holds they are none.

Deterministic for a given trace and given numbers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bloombee.core import Span

    Floats = NDArray[np.float64]

TICK_S = 15.0
SAMPLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Visitor:
    """A server of a trace: when it comes and vanishes, how many blocks it takes.

    `tokens_per_s` of one sequence through all of them, `load_s` for their weights.
    """

    name: str
    arrives_s: float
    dies_s: float
    width: int
    tokens_per_s: float
    load_s: float


@dataclass(slots=True)
class Resident:
    """A visitor while it is there: `span` is what it serves or loads, `to` where it will go."""

    about: Visitor
    span: Span
    serves: bool = False
    to: Span | None = None
    moved_at_s: float = -1e9


@dataclass(slots=True)
class World:
    """Who is there. `planned` counts for each block what those will give who come or stay;

    `serving` what is given now and `holders` by how many. `version` grows with each change.
    """

    num_blocks: int
    residents: dict[str, Resident] = field(default_factory=dict[str, Resident])
    now_s: float = 0.0
    version: int = 0
    planned: Floats = field(init=False)
    serving: Floats = field(init=False)
    holders: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.planned, self.serving = np.zeros(self.num_blocks), np.zeros(self.num_blocks)
        self.holders = np.zeros(self.num_blocks, np.int64)

    def plan(self, span: Span, rate: float) -> None:
        """Blocks that will be served at `rate`, or (negative) no more."""
        self.planned[span.start : span.end] += rate
        self.version += 1

    def serve(self, one: Resident, *, begins: bool) -> None:
        """`one` begins to serve its span, or ends."""
        sign = 1 if begins else -1
        part = slice(one.span.start, one.span.end)
        self.serving[part] += sign * one.about.tokens_per_s
        self.holders[part] += sign
        one.serves = begins
        self.version += 1

    @property
    def tokens_per_s(self) -> float:
        """What the swarm serves now."""
        return float(self.serving.min()) if self.holders.all() else 0.0

    @property
    def gaps(self) -> int:
        """Blocks that nobody serves."""
        return int((self.holders == 0).sum())


class Rule(Protocol):
    """Decides who holds what. `drain_s`: how long a mover still serves its old blocks."""

    @property
    def name(self) -> str: ...
    @property
    def drain_s(self) -> float: ...
    def place(self, world: World, width: int) -> Span:
        """Where a newcomer goes."""
        ...

    def moves(self, world: World) -> Sequence[tuple[Resident, Span]]:
        """Who begins to move now, and where to; in turn, each of them seen by the next."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """At `at_s` all servers that hold `block` vanish, `most` at most."""

    at_s: float
    block: int
    most: int


@dataclass(frozen=True, slots=True)
class History:
    """What happened: samples of tokens/s and of missing blocks, and what they add up to.

    `gap_block_s` adds up blocks without a holder over time, `gap_s` the time with any;
    both from `since_s` on, when the swarm has come up. `heals_s` are the lengths of all
    times with a gap that ended, `loss_s` that of the loss (infinite if it never healed).
    """

    times_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    present: tuple[int, ...]
    mean_tokens_per_s: float
    gap_block_s: float
    gap_s: float
    moves: int
    counted_s: float
    heals_s: tuple[float, ...]
    loss_s: float | None


_ARRIVE, _LOADED, _DRAINED, _DIE, _TICK, _LOSS, _SAMPLE = range(7)


class Churn:
    """Plays one trace under one rule."""

    def __init__(
        self, num_blocks: int, visitors: Sequence[Visitor], rule: Rule, since_s: float
    ) -> None:
        self.world = World(num_blocks)
        self._visitors = {visitor.name: visitor for visitor in visitors}
        self._rule = rule
        self._since_s = since_s
        self._events: list[tuple[float, int, int, str]] = []
        self._count = 0
        self._sums = np.zeros(3)  # tokens, gap blocks, gap seconds
        self._moves = 0
        self._heals: list[float] = []
        self._gap_since_s: float | None = None
        self._loss: Loss | None = None
        self._loss_s: float | None = None
        self._samples: list[tuple[float, float, int]] = []

    def run(self, until_s: float, loss: Loss | None = None) -> History:
        """Play up to `until_s`."""
        self._loss = loss
        for visitor in self._visitors.values():
            self._schedule(visitor.arrives_s, _ARRIVE, visitor.name)
            self._schedule(visitor.dies_s, _DIE, visitor.name)
        if loss is not None:
            self._schedule(loss.at_s, _LOSS)
        for step, kind in ((TICK_S, _TICK), (SAMPLE_S, _SAMPLE)):
            for index in range(int(until_s / step)):
                self._schedule(index * step, kind)
        acts = self._acts()
        while self._events and self._events[0][0] <= until_s:
            at_s, _, kind, name = heapq.heappop(self._events)
            self._pass_to(at_s)
            acts[kind](name)
            self._note_gap()
        self._pass_to(until_s)
        return self._history(until_s)

    def _acts(self) -> dict[int, Callable[[str], None]]:
        return {
            _ARRIVE: self._arrive,
            _LOADED: self._loaded,
            _DRAINED: self._drained,
            _DIE: self._die,
            _TICK: self._tick,
            _LOSS: self._lose,
            _SAMPLE: self._sample,
        }

    def _schedule(self, at_s: float, kind: int, name: str = "") -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, kind, name))

    def _pass_to(self, at_s: float) -> None:
        world = self.world
        passed = at_s - max(world.now_s, self._since_s)
        if passed > 0:
            gaps = world.gaps
            self._sums += passed * np.array([world.tokens_per_s, gaps, gaps > 0])
        world.now_s = at_s

    def _note_gap(self) -> None:
        world = self.world
        if world.gaps and self._gap_since_s is None:
            self._gap_since_s = world.now_s
        elif not world.gaps and self._gap_since_s is not None:
            if self._gap_since_s >= self._since_s:
                self._heals.append(world.now_s - self._gap_since_s)
            if self._loss_s == float("inf") and self._loss is not None:
                self._loss_s = world.now_s - self._loss.at_s
            self._gap_since_s = None

    def _arrive(self, name: str) -> None:
        about = self._visitors[name]
        span = self._rule.place(self.world, about.width)
        self.world.residents[name] = Resident(about, span)
        self.world.plan(span, about.tokens_per_s)
        self._schedule(self.world.now_s + about.load_s, _LOADED, name)

    def _loaded(self, name: str) -> None:
        one = self.world.residents.get(name)
        if one is not None and not one.serves:
            self.world.serve(one, begins=True)

    def _die(self, name: str) -> None:
        one = self.world.residents.pop(name, None)
        if one is None:
            return
        self.world.plan(one.to or one.span, -one.about.tokens_per_s)
        if one.serves:
            self.world.serve(one, begins=False)

    def _lose(self, _name: str) -> None:
        loss = self._loss
        if loss is None:
            return
        doomed = [
            name
            for name, one in self.world.residents.items()
            if one.serves and loss.block in one.span
        ]
        for name in doomed[: loss.most]:
            self._die(name)
        if self.world.gaps:
            self._loss_s = float("inf")

    def _tick(self, _name: str) -> None:
        for one, to in self._rule.moves(self.world):
            self._moves += self.world.now_s >= self._since_s
            one.to = to
            self.world.plan(one.span, -one.about.tokens_per_s)
            self.world.plan(to, one.about.tokens_per_s)
            self._schedule(self.world.now_s + self._rule.drain_s, _DRAINED, one.about.name)

    def _drained(self, name: str) -> None:
        one = self.world.residents.get(name)
        if one is None or one.to is None:
            return
        self.world.serve(one, begins=False)
        one.span, one.to, one.moved_at_s = one.to, None, self.world.now_s
        self._schedule(self.world.now_s + one.about.load_s, _LOADED, name)

    def _sample(self, _name: str) -> None:
        world = self.world
        self._samples.append((world.now_s, world.tokens_per_s, len(world.residents)))

    def _history(self, until_s: float) -> History:
        counted_s = until_s - self._since_s
        times, tokens, present = zip(*self._samples, strict=True) if self._samples else ((),) * 3
        return History(
            times,
            tokens,
            present,
            float(self._sums[0]) / counted_s,
            float(self._sums[1]),
            float(self._sums[2]),
            self._moves,
            counted_s,
            tuple(self._heals),
            self._loss_s,
        )
