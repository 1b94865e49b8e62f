"""A session: one client's sequences and their KV on every stage of a route.

The client opens one stream to every stage, in parallel; each stage links to the
next by a secret that only this client's stages know. A step goes to the first
stage, travels from stage to stage, and its output comes from the last. A long
prompt leaves as several steps, a few of them in flight at a time, so that all
stages work. Whatever fails (a stage's report, a broken stream, a deadline, a
cancelled caller) ends the session on every stage: the caller gets the error, and
never tokens computed from something half done.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float

from bloombee.client.history import Entry, History
from bloombee.client.links import (
    Connect,
    StageFailure,
    StageLink,
    connect_stages,
    deadline,
    first_failure,
)
from bloombee.client.payloads import decode_rows, encode_rows
from bloombee.client.split import Part, Want, part_tokens, split
from bloombee.client.traffic import StepTrace, Traffic
from bloombee.config.client import ClientSettings
from bloombee.core import PackedTable, Route
from bloombee.core.identifiers import SESSION_ID_BYTES
from bloombee.errors import BloomBeeError, ProtocolError, RequestError, TransportError
from bloombee.protocol.messages import (
    Acknowledged,
    AnyMessage,
    Failed,
    Open,
    Opened,
    Operations,
    Output,
    Step,
    WireDtype,
)
from bloombee.telemetry import now_us
from bloombee.transport.interface import Endpoint

_log = logging.getLogger(__name__)

NO_OPERATIONS = Operations()
StepPhase = Literal["prefill", "decode", "verify"]
Answer = asyncio.Future[tuple[Output, memoryview]]


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a session reserves, and the rows that travel in it: `[T, hidden_size]` of `dtype`.

    With `whole_prompts` no step is split: the model rotates by the length of the call.
    """

    fingerprint: str
    sequences: int
    max_length: int
    hidden_size: int
    dtype: WireDtype
    whole_prompts: bool = False


class RemoteSession:
    """An open session. Everything here runs in one event loop; one step at a time."""

    def __init__(
        self,
        route: Route,
        terms: SessionTerms,
        links: Sequence[StageLink],
        settings: ClientSettings,
    ) -> None:
        self.route = route
        self.terms = terms
        self.history = History(terms.sequences)
        self.max_step_tokens = 0
        self.traffic = Traffic([link.connection.counters for link in links])
        self._links = list(links)
        self._settings = settings
        self._session = os.urandom(SESSION_ID_BYTES)
        self._steps = 0
        self._waiting: dict[int, Answer] = {}
        self._failure: BloomBeeError | None = None
        self._closing: asyncio.Event | None = None

    @classmethod
    async def open(
        cls,
        route: Route,
        endpoints: Sequence[Sequence[Endpoint]],
        terms: SessionTerms,
        *,
        connect: Connect,
        settings: ClientSettings,
        tasks: asyncio.TaskGroup,
    ) -> RemoteSession:
        """Reach all stages, reserve on each, and start to listen in `tasks`.

        Raises StageFailure, which carries the peer and its error.
        """
        links = await connect_stages(route, endpoints, connect)
        session = cls(route, terms, links, settings)
        try:
            opened = await session._open_stages()
        except BaseException:
            await session.close()
            raise
        budget = settings.payload_bytes // (terms.hidden_size * _ITEM_BYTES[terms.dtype])
        allowed = min(o.max_step_tokens for o in opened)
        session.max_step_tokens = allowed if terms.whole_prompts else max(1, min(budget, allowed))
        for link in links:
            link.reader = tasks.create_task(link.listen(session._take, session._fail))
        return session

    async def _open_stages(self) -> list[Opened]:
        opened: dict[int, Opened] = {}
        secret = os.urandom(SESSION_ID_BYTES)

        async def reserve(index: int, link: StageLink) -> None:
            following = self._links[index + 1].hop if index + 1 < len(self._links) else None
            message = Open(
                session=self._session,
                secret=secret,
                epoch=0,
                fingerprint=self.terms.fingerprint,
                start=link.stage.span.start,
                end=link.stage.span.end,
                sequences=self.terms.sequences,
                max_length=self.terms.max_length,
                dtype=self.terms.dtype,
                next=following,
            )
            try:
                opened[index] = await link.open(message, self._settings.open_s)
            except BloomBeeError as error:
                raise StageFailure(link.stage.peer, error) from error

        try:
            async with asyncio.TaskGroup() as tasks:
                for index, link in enumerate(self._links):
                    tasks.create_task(reserve(index, link))
        except BaseExceptionGroup as group:
            raise first_failure(group) from None
        return list(opened.values())

    @property
    def is_open(self) -> bool:
        """Whether steps can be taken."""
        return self._failure is None and self._closing is None

    async def step(
        self,
        rows: Float[torch.Tensor, "T D"],
        table: PackedTable,
        *,
        entries: Sequence[Entry],
        operations: Operations = NO_OPERATIONS,
        want: Want = "last",
        phase: StepPhase = "decode",
    ) -> Float[torch.Tensor, "R D"]:
        """Send T packed rows through all stages; returns the rows that `want` asks for.

        `all` gives T rows, `last` one for each sequence of the table, `none` none.
        `operations` are applied before. `entries` (the T ids) are kept in `history`.
        Raises RequestError when a sequence would outgrow the session (nothing is
        sent then); otherwise an error closes the session: what a stage reported,
        TransportError, DeadlineExceeded, ProtocolError.
        """
        self._check(table)
        try:
            self.history.apply(operations)
            self.history.append(table, entries)
            return await self._exchange(rows, table, operations, want, phase)
        except BaseException as error:
            self._fail(
                error
                if isinstance(error, BloomBeeError)
                else RequestError("the step was cancelled")
            )
            await self.close()
            raise

    def _check(self, table: PackedTable) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"the session is over: {self._failure}")
        if self._closing is not None:
            raise RequestError("the session is closed; open another")
        limit = self.terms.max_length
        if any(f + c > limit for f, c in zip(table.first_positions, table.counts, strict=True)):
            longest = max(f + c for f, c in zip(table.first_positions, table.counts, strict=True))
            raise RequestError(
                f"a sequence would hold {longest} tokens, the session was opened for {limit}"
            )
        if self.terms.whole_prompts and table.tokens > self.max_step_tokens:
            raise RequestError(
                f"this model computes a prompt in one step, of at most {self.max_step_tokens} "
                f"tokens here, and this one has {table.tokens}: send fewer or shorter prompts"
            )

    async def _exchange(
        self,
        rows: torch.Tensor,
        table: PackedTable,
        operations: Operations,
        want: Want,
        phase: StepPhase,
    ) -> torch.Tensor:
        one_stage = phase != "prefill" or len(self._links) == 1
        if self.terms.whole_prompts or (one_stage and table.tokens <= self.max_step_tokens):
            size = table.tokens
        else:
            least = self._settings.prefill_tokens
            size = part_tokens(table.tokens, len(self._links), least, self.max_step_tokens)
        sent: list[tuple[Part, Answer]] = []
        outputs: list[torch.Tensor] = []
        for part in split(table, want, size):
            if len(sent) - len(outputs) >= self._settings.steps_in_flight:
                outputs.append(await self._receive(*sent[len(outputs)]))
            chunk = rows[part.start : part.stop]
            sent.append((part, await self._send(chunk, part, operations, phase)))
            operations = NO_OPERATIONS
        while len(outputs) < len(sent):
            outputs.append(await self._receive(*sent[len(outputs)]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    async def _send(
        self, rows: torch.Tensor, part: Part, operations: Operations, phase: StepPhase
    ) -> Answer:
        payload, content = encode_rows(rows, self.terms.dtype)
        self._steps += 1
        message = Step(
            session=self._session,
            epoch=0,
            step=self._steps,
            phase=phase,
            sequences=part.table.sequences,
            first_positions=part.table.first_positions,
            counts=part.table.counts,
            payload=payload,
            want=part.wants,
            parents=part.table.parents,
            operations=operations,
            trace=self._settings.trace,
        )
        answer: Answer = asyncio.get_running_loop().create_future()
        self._waiting[self._steps] = answer
        if self._settings.trace:
            answer.add_done_callback(partial(self._trace, now_us()))
        async with deadline(self._settings.step_s, f"sending a step to {self._links[0]}"):
            await self._links[0].connection.send(message, content)
        return answer

    async def _receive(self, part: Part, answer: Answer) -> torch.Tensor:
        async with deadline(self._settings.step_s, f"a step through {self.route}"):
            output, content = await answer
        rows = {"all": part.table.tokens, "last": len(part.table.counts), "none": 0}[part.wants]
        shape = (rows, self.terms.hidden_size)
        return decode_rows(output.payload, content, shape, self.terms.dtype)[: part.kept]

    def _trace(self, sent_us: int, answer: Answer) -> None:
        if not answer.cancelled() and answer.exception() is None:
            taken = StepTrace(now_us() - sent_us, answer.result()[0].timings)
            self.traffic.traces.append(taken)

    def _take(self, link: StageLink, message: AnyMessage, payload: memoryview) -> None:
        match message:
            case Output() if link is self._links[-1] and message.step in self._waiting:
                answer = self._waiting.pop(message.step)
                if not answer.done():
                    answer.set_result((message, payload))
            case Failed():
                self._fail(link.told(message))
            case Acknowledged():
                _log.debug("%s had step %d before", link, message.step)
            case _:
                self._fail(ProtocolError(f"{link} sent {type(message).__name__} unasked"))

    def _fail(self, error: BloomBeeError) -> None:
        """Remember the first error and wake whoever waits for an answer."""
        if self._failure is None and self._closing is None:
            self._failure = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._failure or error)
                answer.exception()  # it counts as seen: a caller may have gone
        self._waiting.clear()

    async def close(self) -> None:
        """Free the session on every stage. Never raises; may be called again."""
        if self._closing is not None:
            await self._closing.wait()
            return
        self._closing = asyncio.Event()
        self._fail(TransportError("the session was closed"))
        try:
            async with asyncio.TaskGroup() as tasks:
                for link in self._links:
                    tasks.create_task(link.close(self._session, self._settings.close_s))
        finally:
            self._closing.set()


_ITEM_BYTES: dict[WireDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
