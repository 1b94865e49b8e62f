"""A batch as micro-batches that decode without waiting for each other.

Each is a session of some of the rows: its next token enters the first stage as soon as
the one before has left the last. Where the servers have no room for all of them at
once, some wait until others are done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from bloombee.client.batch import BatchTerms, RemoteBatch
from bloombee.client.tokens import Emit
from bloombee.errors import BloomBeeError, KVFull
from bloombee.protocol.messages import Sampling


@dataclass(frozen=True, slots=True)
class Strand:
    """One micro-batch: the rows from `first_row` on; each `repeats` neighbours have one prompt.

    In the `background` it gives way to others at the servers.
    """

    first_row: int
    prompts: tuple[Sequence[int], ...]
    samplings: tuple[Sampling, ...]
    repeats: int = 1
    background: bool = False

    @property
    def terms(self) -> BatchTerms:
        """The session that it needs."""
        rows = zip(self.prompts, self.samplings, strict=True)
        longest = max(len(ids) + sampling.budget - 1 for ids, sampling in rows)
        return BatchTerms(
            len(self.prompts),
            longest,
            growable=False,
            repeats=self.repeats,
            background=self.background,
            server_head=True,
        )

    def split(self, count: int) -> list[Strand]:
        """About `count` strands of its rows; those of one prompt are parted only if need be."""
        rows, groups = len(self.prompts), len(self.prompts) // self.repeats
        if count <= groups:
            cuts = [groups * index // count * self.repeats for index in range(count + 1)]
        else:
            pieces = min(self.repeats, -(-count // groups))
            cuts = [
                group * self.repeats + self.repeats * piece // pieces
                for group in range(groups)
                for piece in range(pieces)
            ] + [rows]
        return [
            Strand(
                self.first_row + start,
                self.prompts[start:stop],
                self.samplings[start:stop],
                min(self.repeats, stop - start),
                self.background,
            )
            for start, stop in zip(cuts, cuts[1:], strict=False)
        ]


class MicroBatches:
    """The sessions of one call, made by `new_batch`. Everything runs in the client's loop."""

    def __init__(self, new_batch: Callable[[BatchTerms], RemoteBatch], emit: Emit) -> None:
        self._new_batch = new_batch
        self._emit = emit
        self._running = 0
        self._ended = asyncio.Event()

    async def run(
        self, strands: Sequence[Strand], beside: Coroutine[Any, Any, None] | None = None
    ) -> None:
        """Decode all of them, and run `beside` as long. Raises the first error, when all ended."""
        failures: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run(strand)) for strand in strands]
                if beside is not None:
                    aside = tasks.create_task(beside)
                    await asyncio.wait(running)
                    aside.cancel()
        except* BloomBeeError as group:
            failures.extend(group.exceptions)
        if failures:
            raise failures[0]

    async def _run(self, strand: Strand) -> None:
        batch = self._new_batch(strand.terms)
        try:
            await self._open(batch, strand)
            self._running += 1
            try:
                await batch.decode(strand.prompts, strand.samplings, self._emit, strand.first_row)
            finally:
                self._running -= 1
        finally:
            await batch.end()
            self._ended.set()

    async def _open(self, batch: RemoteBatch, strand: Strand) -> None:
        while True:
            self._ended.clear()
            try:
                await batch.open(strand.prompts)
            except KVFull:
                if not self._running and not self._ended.is_set():
                    raise
                await self._ended.wait()
            else:
                return
