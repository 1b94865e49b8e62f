"""Rebuilding stages that hold nothing: the steps of a replay, sent and waited for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from jaxtyping import Float

from bloombee.client.circuit import Circuit, Interrupted
from bloombee.client.history import Entry, History, ids_of
from bloombee.client.links import StageLink
from bloombee.client.payloads import encode_ids, encode_rows
from bloombee.client.rebuild import Gap, Rows, rows_of_client, rows_of_stage
from bloombee.client.split import Part
from bloombee.client.terms import SessionTerms
from bloombee.compression import Buffer
from bloombee.config.client import ClientSettings
from bloombee.errors import BloomBeeError
from bloombee.protocol.messages import Operations, Payload, Replay, Step

EmbedEntries = Callable[[Sequence[Entry], torch.Tensor], Float[torch.Tensor, "T D"]]
"""Entries of a history and their positions `[T]` to the rows that enter the first block."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a session has sent, and how its ids become rows again."""

    terms: SessionTerms
    history: History
    embed: EmbedEntries


@dataclass(slots=True)
class Effort:
    """What a recovery has made stages compute again."""

    tokens: int = 0
    row_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """One step of a replay, to be sent on `link`."""

    link: StageLink
    message: Step | Replay
    content: Buffer
    answer: asyncio.Future[None]


class Rebuilder:
    """Has gaps of one circuit filled again."""

    def __init__(self, circuit: Circuit, past: Past, settings: ClientSettings) -> None:
        self._circuit = circuit
        self._past = past
        self._settings = settings
        self._as_of = 0

    async def fill(self, gaps: Sequence[Gap], effort: Effort, went_on: Callable[[], None]) -> None:
        """Replay into all gaps until the last stage of each has answered.

        `went_on` is called after every answer. Raises Interrupted when a stage can't be
        sent to; what else happens to stages interrupts from outside.
        """
        self._as_of = self._circuit.ledger.answered
        jobs = chain.from_iterable(zip_longest(*(self._jobs(gap, effort) for gap in gaps)))
        window = self._settings.steps_in_flight * max(1, len(gaps))
        waiting: deque[asyncio.Future[None]] = deque()
        try:
            for job in filter(None, jobs):
                if len(waiting) >= window:
                    await waiting.popleft()
                    went_on()
                await send(job.link, job.message, job.content)
                waiting.append(job.answer)
            while waiting:
                await waiting.popleft()
                went_on()
        finally:
            self._circuit.ledger.drop_replays()

    def _jobs(self, gap: Gap, effort: Effort) -> Iterator[_Job]:
        seats = self._circuit.seats
        involved = seats[max(0, gap.first - 1) : gap.last + 1]
        limit = min(seat.standing.max_step_tokens for seat in involved)
        limit = self._past.terms.step_tokens(limit, self._settings.payload_bytes)
        rows = self._rows(gap)
        releases = self._releases(rows)
        for part in self._parts(rows, gap, limit):
            effort.tokens += part.table.tokens * gap.stages
            effort.row_bytes += part.table.tokens * gap.stages * self._past.terms.row_bytes
            make = self._from_stage if gap.first else self._from_here
            yield make(gap, rows, part, releases)
            releases = ()  # a sequence is released once

    def _releases(self, rows: Rows) -> tuple[int, ...]:
        """The sequences that are gone as of `rows`; pending steps release others themselves."""
        later: set[int] = set()
        for step in self._circuit.ledger:
            if step.number not in rows.included:
                later.update(step.operations.releases)
        return tuple(sorted(self._past.history.released - later))

    def _parts(self, rows: Rows, gap: Gap, limit: int) -> Iterator[Part]:
        if not self._past.terms.whole_prompts:
            return rows.parts(gap.stages, self._settings.prefill_tokens, limit)
        history = self._past.history
        return rows.whole_parts([history.starts(s) for s in range(len(history))], limit)

    def _rows(self, gap: Gap) -> Rows:
        ledger, history = self._circuit.ledger, self._past.history
        if not gap.first:
            return rows_of_client(history.lengths, ledger, history.released)
        before = self._circuit.seats[gap.first - 1].standing
        held, newest = before.held_tokens, before.newest_steps
        return rows_of_stage(held, newest, ledger, history.released)

    def _from_stage(self, gap: Gap, rows: Rows, part: Part, releases: tuple[int, ...]) -> _Job:
        circuit, table = self._circuit, part.table
        number, answer = circuit.ledger.expect_replay()
        message = Replay(
            session=circuit.session,
            epoch=circuit.epoch,
            step=number,
            sequences=table.sequences,
            first_positions=table.first_positions,
            counts=table.counts,
            until=circuit.seats[gap.last].span.end,
            as_of=self._as_of,
            included=rows.included,
            releases=releases,
        )
        return _Job(circuit.seats[gap.first - 1].stream, message, b"", answer)

    def _from_here(self, gap: Gap, rows: Rows, part: Part, releases: tuple[int, ...]) -> _Job:
        circuit, table = self._circuit, part.table
        payload, content = self._encoded(part)
        number, answer = circuit.ledger.expect_replay()
        message = Step(
            session=circuit.session,
            epoch=circuit.epoch,
            step=number,
            phase="prefill",
            sequences=table.sequences,
            first_positions=table.first_positions,
            counts=table.counts,
            payload=payload,
            want="none",
            operations=Operations(releases=releases),
            replay=True,
            until=circuit.seats[gap.last].span.end,
            as_of=self._as_of,
            included=rows.included,
        )
        return _Job(circuit.seats[0].stream, message, content, answer)

    def _encoded(self, part: Part) -> tuple[Payload, Buffer]:
        entries: list[Entry] = []
        for row in part.table.rows():
            past = self._past.history.entries(row.sequence)
            entries.extend(past[row.first_position : row.first_position + row.count])
        ids = ids_of(entries)
        if len(ids) == len(entries):
            return encode_ids(ids)
        rows = self._past.embed(entries, torch.from_numpy(part.table.positions))
        return encode_rows(rows, self._past.terms.dtype, self._circuit.rows_in("prefill"))


async def send(link: StageLink, message: Step | Replay, content: Buffer) -> None:
    """Send on `link`; when that fails the link counts as gone, and Interrupted is raised."""
    try:
        await link.send(message, content)
    except BloomBeeError as error:
        link.lose(type(error)(f"{link}: {error}"))
        raise Interrupted from error
