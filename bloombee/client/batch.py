"""The past of a batch: its rows, which of its columns were masked, and the session behind.

Columns are counted as transformers counts them, padding included; lengths are
those of the unmasked tokens, which is all that servers ever see. Cropping and
reordering change only what is written here: they travel with the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped

from bloombee.client.embedding import Embed, Tokens
from bloombee.client.history import Entry, entries_of
from bloombee.client.loop import LoopThread
from bloombee.client.packing import Packing
from bloombee.client.rows import Row, resolve
from bloombee.client.session import RemoteSession
from bloombee.client.split import Want
from bloombee.client.tables import ascending, reordered, table_of
from bloombee.client.tokens import Emit, Line
from bloombee.client.work import StepPhase, Work
from bloombee.core import PackedTable
from bloombee.errors import RequestError
from bloombee.protocol.messages import Sampling

Prompts = tuple[tuple[int, ...], ...]
OpenSession = Callable[[int, int, Prompts], Coroutine[Any, Any, RemoteSession]]
"""Opens a session of so many sequences and so many tokens each, for these prompts, if known."""


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """`rows` of up to `max_length` tokens each.

    A `growable` batch may exceed that: it moves to a larger session, whose servers
    compute its past again. Of each `repeats` neighbouring rows the prompt is the
    same (beams, several answers to one prompt): it is computed once and forked.
    A `background` one gives way to others at the servers; with `server_head` they choose its
    tokens.
    """

    rows: int
    max_length: int
    growable: bool = True
    repeats: int = 1
    background: bool = False
    server_head: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """What a batch computes with; `max_length` is how long the model lets a row grow."""

    open_session: OpenSession
    embed: Embed
    loop: LoopThread
    max_length: int
    left_s: Callable[[], float | None] = lambda: None
    """Seconds that the caller's whole request has left; None without a limit of its own."""


class RemoteBatch:
    """Rows that continue on the servers. Opens its session with the first tokens."""

    def __init__(self, terms: BatchTerms, backend: Backend) -> None:
        self.terms = terms
        self.columns = 0
        self.session: RemoteSession | None = None
        self.mask: Shaped[torch.Tensor, "B C"] | None = None
        """Which columns are unmasked; None while all are."""
        self.carried: Float[torch.Tensor, "B D"] | None = None
        """Result of each row's last token, while some position is masked."""
        self._backend = backend
        self._rows = [Row(index, 0) for index in range(terms.rows)]
        self._sharing = terms.repeats
        self._closed = False
        self._finalizer: weakref.finalize[..., RemoteBatch] | None = None

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """Unmasked tokens held of each row."""
        return [row.length for row in self._rows]

    @property
    def sharing(self) -> int:
        """How many neighbouring rows still have one past, and get one computation."""
        return self._sharing

    def stop_sharing(self) -> None:
        """From now on every row gets tokens of its own."""
        self._sharing = 1

    def entries(self, row: int) -> Sequence[Entry]:
        """What was sent of a row, as far as it counts."""
        if self.session is None:
            return ()
        held = self._rows[row]
        return self.session.history.entries(held.sequence)[: held.length]

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns. Raises RequestError when fewer are held."""
        if not 0 <= columns <= self.columns:
            raise RequestError(f"can't remove {columns} columns of {self.columns}")
        if not columns:
            return
        self.columns -= columns
        lengths = [self.columns] * self.rows
        if self.mask is not None:
            self.mask = self.mask[:, : self.columns]
            lengths = self.mask.sum(1).tolist()
            self.carried = None  # of tokens that are gone
        self._rows = [Row(r.sequence, n) for r, n in zip(self._rows, lengths, strict=True)]

    def select(self, indices: Int[torch.Tensor, " N"]) -> None:
        """Row i becomes what row `indices[i]` is."""
        rows = [self._rows[index] for index in indices.tolist()]
        if rows != self._rows:
            self._sharing = 1
        self._rows = rows
        if self.mask is not None:
            self.mask = self.mask[indices]
        if self.carried is not None:
            self.carried = self.carried[indices]

    def advance(
        self, packing: Packing, tokens: Tokens, want: Want, phase: StepPhase
    ) -> Float[torch.Tensor, "R D"]:
        """Send the packed new tokens of all rows (of each `sharing` rows only the first).

        Returns the last block's rows for what `want` asks, in the order of the batch;
        rows without a token have none. Changes lengths, not columns: see `extend`.
        Raises RequestError before anything is sent when it does not fit.
        """
        answer = self._backend.loop.run(self._advance(packing.counts, tokens, want, phase))
        self._grow(packing.counts)
        return answer

    async def _advance(
        self, counts: Sequence[int], tokens: Tokens, want: Want, phase: StepPhase
    ) -> torch.Tensor:
        """`advance` in the client's loop, without counting the tokens."""
        needed = max(r.length + n for r, n in zip(self._own, counts, strict=True))
        session = await self._session_for(needed, self._prompts(counts, tokens, want))
        # A new session has numbered the rows anew.
        placed = resolve(self._own, session.history.lengths)
        table = table_of(placed.rows, counts)
        order = ascending(table)
        if order is not None:
            table, tokens = reordered(table, order), tokens.select(order)
        entries, rows = self._content(tokens, table)
        work = Work(
            table=table,
            entries=entries,
            rows=rows,
            operations=placed.operations,
            want=want,
            phase=phase,
        )
        entered = session.entered
        try:
            answer = await session.step(work, within_s=self._backend.left_s())
        finally:
            if session.entered != entered:  # whatever became of it, rows lie there now
                self._own = placed.rows
        return answer if order is None else answer[torch.tensor(order).argsort()]

    def _content(
        self, tokens: Tokens, table: PackedTable
    ) -> tuple[list[Entry], torch.Tensor | None]:
        """What the session's history keeps of tokens, and their rows where there are no ids."""
        if tokens.ids is not None:
            return tokens.ids.tolist(), None
        rows = self._backend.embed(tokens, torch.from_numpy(table.positions))
        rows = rows.clone()  # the caller's own, which may change before it is answered
        return entries_of(rows), rows

    def _grow(self, counts: Sequence[int]) -> None:
        self._own = [Row(r.sequence, r.length + n) for r, n in zip(self._own, counts, strict=True)]

    @property
    def _own(self) -> Sequence[Row]:
        """The rows that get a computation of their own."""
        return self._rows[:: self._sharing]

    @_own.setter
    def _own(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows for _ in range(self._sharing)]

    async def decode(
        self,
        new: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        emit: Emit,
        first_row: int,
    ) -> None:
        """Continue every row by its new ids, and then by tokens that the servers choose.

        In the client's loop. Tokens go to `emit`, numbered from `first_row`. Changes lengths, not
        columns: see `settle`. Raises as `RemoteSession.decode`, and RequestError before
        anything is sent when it does not fit.
        """
        rows = zip(self._rows, new, samplings, strict=True)
        needed = max(row.length + len(ids) + s.budget - 1 for row, ids, s in rows)
        if heads := self._heads(new):
            await self._share(heads)
            new = [ids[-1:] for ids in new]
        session = await self._session_for(needed, self._announced(new))
        placed = resolve(self._rows, session.history.lengths)
        table = table_of(placed.rows, [len(ids) for ids in new])
        order = ascending(table) or range(len(new))
        lines = [Line(first_row + i, placed.rows[i].sequence, samplings[i]) for i in order]
        work = Work(
            table=reordered(table, order),
            entries=[token for index in order for token in new[index]],
            operations=placed.operations,
            phase="decode" if table.is_decode else "prefill",
        )
        entered = session.entered
        try:
            await session.decode(work, lines, emit, within_s=self._backend.left_s())
        finally:
            if session.entered != entered:
                self._rows = [
                    Row(r.sequence, session.history.length(r.sequence)) for r in placed.rows
                ]

    def _heads(self, new: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """What rows of one prompt have in common before its last id, once for all of them."""
        if self._sharing == 1:
            return []
        heads = [ids[:-1] for ids in new[:: self._sharing]]
        return heads if any(heads) else []

    async def _share(self, heads: Sequence[Sequence[int]]) -> None:
        ids = torch.tensor([token for head in heads for token in head])
        counts = [len(head) for head in heads]
        await self._advance(counts, Tokens(ids), "none", "prefill")
        self._grow(counts)
        self._sharing = 1

    def settle(
        self, packing: Packing, mask: Shaped[torch.Tensor, "B S"] | None, before: Sequence[int]
    ) -> None:
        """Count the columns of a `decode`, as far as it came: of prompts and of tokens after them.

        `before` are the lengths that the rows had. If not even the prompts are held, nothing
        counts.
        """
        wanted = [length + count for length, count in zip(before, packing.counts, strict=True)]
        grown = [length - least for length, least in zip(self.lengths, wanted, strict=True)]
        if min(grown) < 0:
            self._rows = [
                Row(r.sequence, min(r.length, n)) for r, n in zip(self._rows, before, strict=True)
            ]
            return
        self.extend(packing, mask, None)
        columns = max(grown)
        if not columns:
            return
        held = torch.arange(columns)[None] < torch.tensor(grown)[:, None]  # [B, columns]
        whole = bool(held.all())
        self.extend(Packing.of(self.rows, columns, held), None if whole else held, None)

    def extend(
        self,
        packing: Packing,
        mask: Shaped[torch.Tensor, "B S"] | None,
        last: Float[torch.Tensor, "B D"] | None,
    ) -> None:
        """Count the columns of a step; `mask` and each row's `last` result when any is masked."""
        if self.mask is None and not packing.is_dense:
            self.mask = torch.ones(self.rows, self.columns, dtype=torch.bool)
        if self.mask is not None:
            new = torch.ones(self.rows, packing.columns, dtype=torch.bool)
            self.mask = torch.cat((self.mask, new if mask is None else mask != 0), dim=1)
            self.carried = last
        self.columns += packing.columns

    def check_results(self, packing: Packing) -> None:
        """Raise RequestError when a row without new tokens has a past whose result is gone."""
        if self.carried is not None:
            return
        for index, (row, count) in enumerate(zip(self._own, packing.counts, strict=True)):
            if row.length and not count:
                raise RequestError(
                    f"row {index} has no unmasked token in this step and its last result is not "
                    "kept: unmask one, or go further back"
                )

    def close(self) -> None:
        """Free the session on the servers; the batch can't be continued afterwards."""
        self._closed = True
        if self._finalizer is not None and self._finalizer.alive:
            self._backend.loop.run(self.end())

    async def open(self, new: Sequence[Sequence[int]]) -> None:
        """Reserve on the servers now for a `decode` of `new`; raises as opening a session does."""
        heads = self._heads(new)
        await self._session_for(self.terms.max_length, self._announced(heads or new))

    async def end(self) -> None:
        """`close`, in the client's loop."""
        self._closed = True
        await self._end_session()

    async def _end_session(self) -> None:
        if self._finalizer is not None and self._finalizer.detach() and self.session is not None:
            await self.session.close()

    def _prompts(self, counts: Sequence[int], tokens: Tokens, want: Want) -> Prompts:
        """What a session that begins with these tokens is opened for: servers may know them."""
        if tokens.ids is None or want == "all":
            return ()
        parts = tokens.ids.split(list(counts))
        return self._announced([part.tolist() for part in parts])

    def _announced(self, new: Sequence[Sequence[int]]) -> Prompts:
        if self.session is not None and self.session.entered:
            return ()
        prompts: list[tuple[int, ...]] = [()] * self.rows
        prompts[:: self.rows // len(new)] = [tuple(ids) for ids in new]
        return tuple(prompts)

    async def _session_for(self, needed: int, prompts: Prompts) -> RemoteSession:
        """The session, opened or replaced by one that takes `needed` tokens a row."""
        if self._closed:
            raise RequestError("the session was closed: start another")
        limit = (self.session or self).terms.max_length
        if needed > limit and not self.terms.growable:
            raise RequestError(
                f"a row would hold {needed} tokens, the session was opened for {limit}: "
                f"open it with max_length={needed} or more"
            )
        session = self.session
        if session is not None and not session.entered and session.terms.prompts != prompts:
            await self._end_session()  # nothing is lost, but its servers count on another prompt
            session = self.session = None
        if session is None:
            self._rows = [Row(index, 0) for index in range(self.rows)]
            return await self._adopt(max(needed, limit), prompts)
        if needed <= limit:
            return session if session.is_open else await self._move(limit)
        return await self._move(max(needed, min(2 * limit, self._backend.max_length)))

    async def _adopt(self, max_length: int, prompts: Prompts = ()) -> RemoteSession:
        opening = self._backend.open_session(len(self._rows), max_length, prompts)
        self.session = await opening  # here also when nobody waits for it any more
        self._finalizer = weakref.finalize(self, _abandon, self._backend.loop, self.session)
        if self._closed:  # by a caller who was interrupted, and does not wait for us
            await self._end_session()
            raise RequestError("the session was closed: start another")
        return self.session

    async def _move(self, max_length: int) -> RemoteSession:
        """Compute the past again in a larger session; a failed move can be tried again."""
        past = [list(self.entries(index)) for index in range(self.rows)]
        await self._end_session()
        session = await self._adopt(max_length)
        # In the new session's history from here on, whether its servers have it or not.
        self._rows = [Row(index, len(entries)) for index, entries in enumerate(past)]
        await session.restore(past, self._backend.left_s())
        return session


def _abandon(loop: LoopThread, session: RemoteSession) -> None:
    loop.post(session.close())
