"""What a client does in one session, and what it is answered.

A `Conversation` plays a script against anything that takes steps: a session of the
real client, or the `Oracle`, which holds all blocks and can't fail.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from bloombee.client.rows import Row, resolve
from bloombee.client.work import Work
from bloombee.core import PackedTable
from bloombee.errors import BloomBeeError
from tests.swarm.chaos.digests import VOCABULARY, embed, to_numbers
from tests.swarm.chaos.scripts import (
    Crop,
    Decode,
    Interrupt,
    Leave,
    Pause,
    Reorder,
    Say,
    Tell,
    said,
)
from tests.swarm.chaos.telling import Telling, sampling_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from bloombee.client.history import History
    from bloombee.client.split import Want
    from bloombee.client.tokens import Emit, Line
    from bloombee.client.work import StepPhase
    from bloombee.protocol.messages import Operations
    from tests.swarm.chaos.scripts import Script


class Steps(Protocol):
    """What a session of the client has."""

    history: History

    async def step(self, work: Work) -> torch.Tensor: ...

    async def decode(self, work: Work, lines: Sequence[Line], emit: Emit) -> None: ...


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
                case Tell():
                    await self._tell(act)
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
            tokens.append(said(self._said, row, length))
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

    async def _tell(self, act: Tell) -> None:
        """Whatever interrupts it, what was told counts, and it goes on from there."""
        tellings = [
            Telling(row, [token], sampling_of(act, index))
            for index, (row, token) in enumerate(zip(self._rows, self._newest, strict=True))
        ]
        while going := [each for each in tellings if not each.finished]:
            try:
                await self._try_telling(tellings, going)
            except BloomBeeError as error:
                await self._retry(error)
            history = self._session.history
            self._leaving = [each for each in self._leaving if history.length(each)]
        self._rows = [each.row for each in tellings]
        self._newest = [each.known[-1] for each in tellings]
        self.outputs.append([token for each in tellings for token in each.told])

    async def _try_telling(self, tellings: list[Telling], going: list[Telling]) -> None:
        history = self._session.history
        held = [history.length(sequence) for sequence in range(self._script.rows)]
        placed = resolve([each.row for each in tellings], held)
        for each, row in zip(tellings, placed.rows, strict=True):
            each.row = row
        lines = [each.line(history) for each in going]
        work = Work(
            table=PackedTable(
                tuple(each.row.sequence for each in going),
                tuple(each.row.length for each in going),
                tuple(len(each.rest) for each in going),
            ),
            entries=[token for each in going for token in each.rest],
            operations=self._operations(placed.operations),
        )
        try:
            await self._interrupted(self._session.decode(work, lines, lambda _: None))
            self._leaving = []
        finally:
            for each, line in zip(going, lines, strict=True):
                each.heard(line, history)

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
        rows = embed(ids, table.positions.tolist()) if self._script.sends_rows else None
        work = Work(
            table=table, entries=ids, rows=rows, operations=operations, want=want, phase=phase
        )
        step = self._session.step(work)
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

    async def _interrupted(self, step: Awaitable[Answered]) -> Answered:
        if self._cancel_after_s is None:
            return await step
        after_s, self._cancel_after_s = self._cancel_after_s, None
        try:
            async with asyncio.timeout(after_s):
                return await step
        except TimeoutError:
            raise Interrupted("the caller gave up") from None


Answered = TypeVar("Answered")


class Interrupted(BloomBeeError):
    """The script's own doing."""
