"""A session: one client's sequences and their KV on every stage of a route.

The client opens one stream to every stage, in parallel; each stage links to the
next by a secret that only this client's stages know. A step goes to the first
stage, travels from stage to stage, and its output comes from the last. A long
prompt leaves as several steps, a few of them in flight at a time, so that all
stages work.

Whatever happens to a stage is made good (`recovery`) before the step goes on: the
caller gets the rows of an undisturbed run. An error reaches the caller when time is up,
when blocks have no holder, or when the request is at fault; the session can go on
after each of them, and the next step recovers first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from jaxtyping import Float

from bloombee.client.circuit import Circuit, Seat
from bloombee.client.delivery import Delivery
from bloombee.client.entering import Entering
from bloombee.client.heartbeat import keep_alive
from bloombee.client.history import Entry, History
from bloombee.client.ledger import Ledger, Pace
from bloombee.client.looping import Loop
from bloombee.client.opening import Opening, StageFailure, dial, open_seats
from bloombee.client.prefixes import Beginning, chains
from bloombee.client.replay import EmbedEntries, Past
from bloombee.client.spares import Spares
from bloombee.client.surroundings import Holder, Surroundings
from bloombee.client.terms import SessionTerms
from bloombee.client.tokens import Emit, Line
from bloombee.client.traffic import Progress, Traffic
from bloombee.client.work import Work
from bloombee.core import PackedTable, Route
from bloombee.errors import BloomBeeError, DeadlineExceeded, KVFull, RequestError


class RemoteSession:
    """An open session. Everything here runs in one event loop; one step at a time."""

    def __init__(
        self,
        holders: Sequence[Holder],
        terms: SessionTerms,
        around: Surroundings,
        tasks: asyncio.TaskGroup,
        embed: EmbedEntries,
    ) -> None:
        self.terms = terms
        self.history = History(terms.sequences, keep_starts=terms.whole_prompts)
        self._around = around
        self._settings = around.settings
        seats = [Seat(holder.stage, holder.endpoints) for holder in holders]
        ledger = Ledger(terms.sequences)
        self._circuit = Circuit(seats, ledger, tasks, self._settings.close_s, around.neighbours)
        self._entering = Entering(self._circuit, terms, self.history, self._settings)
        past = Past(terms, self.history, embed)
        self._delivery = Delivery(self._circuit, around, past, self._entering)
        self._background: list[asyncio.Task[None]] = []
        self._closed: asyncio.Event | None = None
        self._prefixes = chains(terms) if self._settings.reuse_prompts else ()
        if self._prefixes:
            self._entering.beginning = Beginning(self._circuit, terms)

    async def open(self, wait_s: float = 0.0) -> None:
        """Reach all stages and reserve on each; where KV is short, queue for it up to `wait_s`.

        Raises StageFailure, which carries the peer and its error; nothing is left then.
        """
        circuit, settings = self._circuit, self._settings
        try:
            refusals = await dial(circuit, circuit.seats, self._around, settings.connect_s)
            if not refusals:
                opening = Opening(
                    terms=self.terms,
                    open_s=settings.open_s / 2,  # there is time for another attempt
                    wait_s=wait_s,
                    in_turn=wait_s > 0,
                    prefixes=self._prefixes,
                )
                self._run(keep_alive(circuit, settings))
                refusals = await open_seats(circuit, opening)
            for refusal in sorted(refusals, key=lambda each: isinstance(each.error, KVFull)):
                raise StageFailure(refusal.seat.peer, refusal.error)
        except BaseException:
            await self.close()
            raise
        self._entering.measure()
        self._run(Spares(circuit, self._around, self.terms).run())
        # Not before: until here it is opening that sees to losses.
        self._run(self._delivery.take_care())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(self._circuit.tasks.create_task(work))

    @property
    def route(self) -> Route:
        """The stages that hold the session now."""
        return self._circuit.route

    @property
    def progress(self) -> Progress:
        """Route and traffic, for whoever shows them; stays true while the session runs."""
        return self._circuit.progress

    @property
    def traffic(self) -> Traffic:
        """What the session moved."""
        return self._circuit.progress.traffic

    @property
    def pace(self) -> Pace:
        """How long its tokens take."""
        return self._circuit.ledger.pace

    @property
    def max_step_tokens(self) -> int:
        """How many tokens one step may carry."""
        return self._entering.max_step_tokens

    @property
    def entered(self) -> int:
        """How many steps are in the history, whatever became of them since."""
        return self._entering.entered

    @property
    def is_open(self) -> bool:
        """Whether steps can be taken."""
        return self._closed is None

    # Steps ---------------------------------------------------------------------------

    async def step(
        self, work: Work, *, within_s: float | None = None
    ) -> Float[torch.Tensor, "R D"]:
        """Send T new tokens through all stages; returns the rows that `work.want` asks for.

        `all` gives T rows, `last` one for each sequence of the table, `none` none.
        `work.operations` are applied before. Its entries are kept in `history`; its rows
        are kept until they are answered and must not change. It takes at most
        `within_s` and the settings' `step_s`, recoveries included.

        Raises RequestError when a sequence would outgrow the session (nothing is sent
        then), DeadlineExceeded, SwarmError when blocks have no holder, or what a stage
        reports of the request. The session goes on after each of them.
        """
        self._check(work.table)
        async with self._turn(self._limit_s(within_s)) as until_s:
            sent = self._entering.enter(work)
            await self._delivery.settle(until_s)
        outputs = [self._entering.rows_of(step) for step in sent]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    async def decode(
        self, work: Work, lines: Sequence[Line], emit: Emit, *, within_s: float | None = None
    ) -> None:
        """Send prompts, whose next tokens the servers choose; returns when all are finished.

        `lines` are those of the sequences of `work.table`, in order; they and `emit` get
        the tokens as they come. Tokens enter the history once they are sent on, so the last
        of each line does not. It takes at most `within_s` or the settings' `request_s`, and
        raises as `step` does. Cut short by an error or a cancellation it may go on at the
        servers for a moment: what lines have by then counts, and the next step makes the
        servers forget the rest.
        """
        self._check(work.table, [line.sampling.budget - 1 for line in lines])
        limit_s = self._settings.request_s if within_s is None else within_s
        async with self._turn(limit_s) as until_s:
            loop = Loop(lines, self.history, self._circuit.ledger, emit)
            try:
                self._entering.enter(work, loop)
                await self._delivery.settle(until_s)
                following = loop.begin()
                if following is not None:
                    self._circuit.ledger.enter(following)
                    await self._delivery.settle(until_s)
            finally:
                if self._circuit.ledger:
                    self._delivery.abandon(loop.sequences)

    @asynccontextmanager
    async def _turn(self, limit_s: float) -> AsyncIterator[float]:
        """What happens inside has the session for itself, which is whole; until when."""
        until_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with self._delivery.turn(until_s):
                yield until_s
        except TimeoutError:
            raise self._late(limit_s) from None
        except DeadlineExceeded as error:
            raise self._late(limit_s, error) from None

    def _limit_s(self, within_s: float | None) -> float:
        return self._settings.step_s if within_s is None else min(within_s, self._settings.step_s)

    def _check(self, table: PackedTable, more: Sequence[int] | None = None) -> None:
        if self._closed is not None:
            raise RequestError("the session is closed; open another")
        limit = self.terms.max_length
        more = more or (0,) * len(table.counts)
        ends = map(sum, zip(table.first_positions, table.counts, more, strict=True))
        if (longest := max(ends)) > limit:
            raise RequestError(
                f"a sequence would hold {longest} tokens, the session was opened for {limit}"
            )
        if self.terms.whole_prompts and table.tokens > self.max_step_tokens:
            raise RequestError(
                f"this model computes a prompt in one step, of at most {self.max_step_tokens} "
                f"tokens here, and this one has {table.tokens}: send fewer or shorter prompts"
            )

    def _late(self, limit_s: float, error: BloomBeeError | None = None) -> DeadlineExceeded:
        message = f"a step through {self.route} took longer than {limit_s:.3g} s"
        return DeadlineExceeded(f"{message}: {error}" if error is not None else message)

    async def restore(self, past: Sequence[Sequence[Entry]], within_s: float | None = None) -> None:
        """Hold these entries in sequences 0, 1, ...: all stages compute them.

        For a new session. Takes as long and raises as `step` does; the entries are in the
        history from the start, and if this fails the next step computes them first.
        """
        for sequence, entries in enumerate(past):
            self.history.restore(sequence, entries)
        self._delivery.forget_stages()
        async with self._turn(self._limit_s(within_s)):
            pass  # it is whole

    async def close(self) -> None:
        """Free the session on every stage. Never raises; may be called again."""
        if self._closed is not None:
            await self._closed.wait()
            return
        self._closed = asyncio.Event()
        try:
            for task in self._background:
                task.cancel()
            await self._circuit.close()
        finally:
            self._closed.set()
