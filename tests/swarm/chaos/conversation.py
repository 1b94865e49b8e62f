"""What a client does in one session, as a seeded script, and the outputs that are right.

A `Conversation` plays a script against anything that takes steps: a session of the
real client, or the `Oracle`, which holds all blocks and can't fail.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from bloombee.client.history import History
from bloombee.client.rows import Row, resolve
from bloombee.core import PackedTable, SessionId, Span
from bloombee.errors import BloomBeeError
from bloombee.kv.interface import BatchItem
from tests.swarm.chaos.digests import VOCABULARY, DigestModel, DigestPool, embed, to_numbers

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from bloombee.client.history import Entry
    from bloombee.client.session import StepPhase
    from bloombee.client.split import Want
    from bloombee.protocol.messages import Operations


# Scripts ---------------------------------------------------------------------


@dataclass(frozen=True)
class Say:
    """New tokens for each row, of these lengths (0: none)."""

    lengths: tuple[int, ...]
    want: Want = "last"


@dataclass(frozen=True)
class Decode:
    """So many greedy tokens for each row."""

    steps: int


@dataclass(frozen=True)
class Reorder:
    """Rows become what other rows are, chosen by the newest outputs, as beams do; then a token."""

    steps: int


@dataclass(frozen=True)
class Crop:
    """Forget the last tokens of each row."""

    tokens: int


@dataclass(frozen=True)
class Leave:
    """The last row has finished; with `release` its KV is given back."""

    release: bool


@dataclass(frozen=True)
class Pause:
    """Nothing, for a while."""

    seconds: float


@dataclass(frozen=True)
class Interrupt:
    """The next step is cancelled after a while, and then asked for again."""

    after_s: float


Act = Say | Decode | Reorder | Crop | Leave | Pause | Interrupt


@dataclass(frozen=True)
class Script:
    """One session."""

    rows: int
    max_length: int
    acts: tuple[Act, ...]


def make_script(luck: random.Random) -> Script:
    """A session of one to four rows: a prompt, some tokens, perhaps more turns."""
    rows = luck.choice((1, 1, 2, 3, 4))
    acts: list[Act] = [Say(tuple(luck.randint(1, 40) for _ in range(rows)))]
    left = rows
    for _ in range(luck.randint(1, 4)):
        act = _next_act(luck, left)
        if isinstance(act, Reorder) and any(isinstance(a, Leave) and a.release for a in acts):
            act = Decode(act.steps)  # forks need a free sequence, and a released one is gone
        acts.append(act)
        left -= isinstance(act, Leave)
    acts.append(Decode(luck.randint(1, 8)))
    longest = sum(_growth(act) for act in acts)
    return Script(rows, longest + luck.randint(0, 8), tuple(acts))


def _next_act(luck: random.Random, rows: int) -> Act:
    kinds = ("decode", "say", "say", "reorder", "reorder", "crop", "leave", "pause", "stop")
    kind = luck.choice(kinds)
    if kind == "leave" and rows > 1:
        return Leave(luck.random() < 0.5)
    if kind == "say":
        lengths = [luck.choice((0, 1, 3, 20)) for _ in range(rows)]
        return Say((*lengths[1:], 5), luck.choice(("last", "last", "all", "none")))
    if kind == "reorder":
        return Reorder(luck.randint(2, 10))
    if kind == "crop":
        return Crop(luck.randint(1, 6))
    if kind == "pause":
        return Pause(luck.choice((0.3, 2.0, 8.0)))
    if kind == "stop":
        return Interrupt(luck.choice((0.0, 0.01, 0.05)))
    return Decode(luck.randint(1, 10))


def _growth(act: Act) -> int:
    match act:
        case Say(lengths):
            return max(lengths)
        case Decode(steps) | Reorder(steps):
            return steps
        case _:
            return 0


# Playing them ------------------------------------------------------------------


class Steps(Protocol):
    """What a session of the client has."""

    history: History

    async def step(
        self,
        rows: torch.Tensor,
        table: PackedTable,
        *,
        entries: Sequence[Entry],
        operations: Operations,
        want: Want = "last",
        phase: StepPhase = "decode",
    ) -> torch.Tensor: ...


class Conversation:
    """`retry` is asked after each error whether to try again; `outputs` is what was answered."""

    def __init__(
        self, session: Steps, script: Script, retry: Callable[[BloomBeeError], Awaitable[None]]
    ) -> None:
        self.outputs: list[list[int]] = []
        self._session = session
        self._script = script
        self._retry = retry
        self._rows = [Row(index, 0) for index in range(script.rows)]
        self._newest = [0] * script.rows
        self._leaving: list[int] = []
        self._cancel_after_s: float | None = None
        self._said = 0

    async def play(self) -> None:
        """The whole script. Raises what `retry` raises."""
        for act in self._script.acts:
            match act:
                case Say():
                    await self._say(act)
                case Decode() | Reorder():
                    for _ in range(act.steps):
                        if isinstance(act, Reorder):
                            self._reorder()
                        await self._decode()
                case Pause():
                    await asyncio.sleep(act.seconds)
                case _:
                    self._note(act)

    def _note(self, act: Crop | Leave | Interrupt) -> None:
        """What shows in the next step only."""
        match act:
            case Crop(tokens):
                self._rows = [replace(r, length=max(1, r.length - tokens)) for r in self._rows]
            case Leave():
                self._leave(act)
            case Interrupt(after_s):
                self._cancel_after_s = after_s

    async def _say(self, act: Say) -> None:
        tokens: list[list[int]] = []
        for row, length in enumerate(act.lengths[: len(self._rows)]):
            self._said += 1
            tokens.append([(self._said * 101 + row * 17 + i) % VOCABULARY for i in range(length)])
        await self._advance(tokens, act.want, "prefill")

    async def _decode(self) -> None:
        await self._advance([[token] for token in self._newest], "last", "decode")

    def _reorder(self) -> None:
        """Rows with good scores replace others."""
        count = len(self._rows)
        chosen = [(self._newest[row] >> 3) % count for row in range(count)]
        self._rows = [self._rows[index] for index in chosen]
        self._newest = [(self._newest[i] + row) % VOCABULARY for row, i in enumerate(chosen)]

    def _leave(self, act: Leave) -> None:
        gone = self._rows.pop()
        self._newest.pop()
        if act.release and all(row.sequence != gone.sequence for row in self._rows):
            self._leaving.append(gone.sequence)

    async def _advance(self, tokens: list[list[int]], want: Want, phase: StepPhase) -> None:
        while True:
            try:
                numbers = await self._try_once(tokens, want, phase)
                break
            except BloomBeeError as error:
                await self._retry(error)
            history = self._session.history
            self._leaving = [each for each in self._leaving if history.length(each)]
        self.outputs.append(numbers)
        live = [index for index, new in enumerate(tokens) if new]
        if want == "last":
            for index, number in zip(live, numbers, strict=True):
                self._newest[index] = number % VOCABULARY
        elif want == "all":
            for index, number in zip(live, numbers, strict=False):
                self._newest[index] = number % VOCABULARY

    async def _try_once(self, tokens: list[list[int]], want: Want, phase: StepPhase) -> list[int]:
        history = self._session.history
        held = [history.length(sequence) for sequence in range(self._script.rows)]
        placed = resolve(self._rows, held)
        operations = self._operations(placed.operations)
        live = [(row, new) for row, new in zip(placed.rows, tokens, strict=True) if new]
        table = PackedTable(
            tuple(row.sequence for row, _ in live),
            tuple(row.length for row, _ in live),
            tuple(len(new) for _, new in live),
        )
        ids = [token for _, new in live for token in new]
        step = self._session.step(
            embed(ids, table.positions.tolist()),
            table,
            entries=ids,
            operations=operations,
            want=want,
            phase=phase,
        )
        answer = await self._interrupted(step)
        self._leaving = []
        self._rows = [
            replace(row, length=row.length + len(new))
            for row, new in zip(placed.rows, tokens, strict=True)
        ]
        return to_numbers(answer)

    def _operations(self, placed: Operations) -> Operations:
        return type(placed)(
            forks=placed.forks, truncates=placed.truncates, releases=tuple(self._leaving)
        )

    async def _interrupted(self, step: Awaitable[torch.Tensor]) -> torch.Tensor:
        if self._cancel_after_s is None:
            return await step
        after_s, self._cancel_after_s = self._cancel_after_s, None
        try:
            async with asyncio.timeout(after_s):
                return await step
        except TimeoutError:
            raise Interrupted("the caller gave up") from None


class Interrupted(BloomBeeError):
    """The script's own doing."""


# What is right -------------------------------------------------------------------


class Oracle:
    """A session on all blocks, in this process, without wire or faults."""

    _session = SessionId(bytes(16))

    def __init__(self, num_blocks: int, script: Script) -> None:
        span = Span(0, num_blocks)
        self.history = History(script.rows)
        self._model = DigestModel(span)
        self._pool = DigestPool(span, script.rows * (script.max_length + 4))
        self._pool.reserve(self._session, script.rows, script.max_length)

    async def step(
        self,
        rows: torch.Tensor,
        table: PackedTable,
        *,
        entries: Sequence[Entry],
        operations: Operations,
        want: Want = "last",
        phase: StepPhase = "decode",
    ) -> torch.Tensor:
        self.history.apply(operations)
        self.history.append(table, entries)
        self._pool.fork(self._session, operations.forks)
        for sequence, length in operations.truncates:
            self._pool.truncate(self._session, sequence, length)
        for sequence in operations.releases:
            self._pool.release(self._session, sequence)
        made = self._model.forward(rows, [BatchItem(self._session, table)], self._pool)
        if want == "all":
            return made
        return made[table.last_rows.tolist()] if want == "last" else made[:0]


async def right_outputs(num_blocks: int, script: Script) -> list[list[int]]:
    """What a swarm has to answer, whatever befalls it."""

    async def never(error: BloomBeeError) -> None:
        raise error

    script = uninterrupted(replace(script, acts=tuple(map(_unhurried, script.acts))))
    told = Conversation(Oracle(num_blocks, script), script, never)
    await told.play()
    return told.outputs


def uninterrupted(script: Script) -> Script:
    """The same, but the caller never gives up on a step."""
    acts = (Pause(0.0) if isinstance(act, Interrupt) else act for act in script.acts)
    return replace(script, acts=tuple(acts))


def _unhurried(act: Act) -> Act:
    return Pause(0.0) if isinstance(act, Pause) else act
