"""The past of a batch: its rows, which of its columns were masked, and the session behind.

Columns are counted as transformers counts them, padding included; lengths are
those of the unmasked tokens, which is all that servers ever see. Cropping and
reordering change only what is written here: they travel with the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped

from bloombee.client.history import Entry, entries_of
from bloombee.client.loop import LoopThread
from bloombee.client.packing import Packing
from bloombee.client.rows import Row, resolve
from bloombee.client.session import RemoteSession, StepPhase
from bloombee.client.split import Want
from bloombee.core import PackedTable
from bloombee.errors import RequestError

Prompts = tuple[tuple[int, ...], ...]
OpenSession = Callable[[int, int, Prompts], Coroutine[Any, Any, RemoteSession]]
"""Opens a session of so many sequences and so many tokens each, for these prompts, if known."""


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """`rows` of up to `max_length` tokens each.

    A `growable` batch may exceed that: it moves to a larger session, whose servers
    compute its past again. Of each `repeats` neighbouring rows the prompt is the
    same (beams, several answers to one prompt): it is computed once and forked.
    """

    rows: int
    max_length: int
    growable: bool = True
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """T packed new tokens: their ids, or token embeddings of width W."""

    ids: Int[torch.Tensor, " T"] | None = None
    embeds: Float[torch.Tensor, "T W"] | None = None

    def select(self, order: Sequence[int]) -> Tokens:
        """These of them, in this order."""
        picked = torch.tensor(order)
        return Tokens(*(None if t is None else t[picked] for t in (self.ids, self.embeds)))

    def entries(self, rows: Float[torch.Tensor, "T D"]) -> list[Entry]:
        """What the session's history keeps of them: ids, or the `rows` that they became."""
        return entries_of(rows) if self.ids is None else self.ids.tolist()


Embed = Callable[[Tokens, torch.Tensor], torch.Tensor]
"""Tokens and positions `[T]` to the rows `[T, D]` that enter the first block."""


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
        rows = self._rows[:: self._sharing]
        needed = max(r.length + n for r, n in zip(rows, packing.counts, strict=True))
        session = self._session_for(needed, self._prompts(packing, tokens, want))
        rows = self._rows[:: self._sharing]  # a new session numbers them anew
        placed = resolve(rows, [session.history.length(s) for s in range(session.terms.sequences)])
        table = _table(placed.rows, packing.counts)
        order = _ascending(table)
        if order is not None:
            table, tokens = _reordered(table, order), tokens.select(order)
        hidden = self._backend.embed(tokens, torch.from_numpy(table.positions))
        if tokens.ids is None:
            hidden = hidden.clone()  # the caller's own, which may change before it is answered
        step = session.step(
            hidden,
            table,
            entries=tokens.entries(hidden),
            operations=placed.operations,
            want=want,
            phase=phase,
            within_s=self._backend.left_s(),
        )
        entered = session.entered
        try:
            answer = self._backend.loop.run(step)
        finally:
            if session.entered != entered:  # whatever became of it, rows lie there now
                self._rows = [row for row in placed.rows for _ in range(self._sharing)]
        grown = [
            Row(r.sequence, r.length + n) for r, n in zip(placed.rows, packing.counts, strict=True)
        ]
        self._rows = [row for row in grown for _ in range(self._sharing)]
        return answer if order is None else answer[torch.tensor(order).argsort()]

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
        rows = self._rows[:: self._sharing]
        for index, (row, count) in enumerate(zip(rows, packing.counts, strict=True)):
            if row.length and not count:
                raise RequestError(
                    f"row {index} has no unmasked token in this step and its last result is not "
                    "kept: unmask one, or go further back"
                )

    def close(self) -> None:
        """Free the session on the servers; the batch can't be continued afterwards."""
        self._closed = True
        self._end_session()

    def _end_session(self) -> None:
        if self._finalizer is not None and self._finalizer.detach() and self.session is not None:
            self._backend.loop.run(self.session.close())

    def _prompts(self, packing: Packing, tokens: Tokens, want: Want) -> Prompts:
        """What a session that begins with these tokens is opened for: servers may know them."""
        if tokens.ids is None or want != "last" or (self.session and self.session.entered):
            return ()
        prompts: list[tuple[int, ...]] = [()] * self.rows
        parts = tokens.ids.split(list(packing.counts))
        prompts[:: self._sharing] = [tuple(part.tolist()) for part in parts]
        return tuple(prompts)

    def _session_for(self, needed: int, prompts: Prompts) -> RemoteSession:
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
            self._end_session()  # nothing is lost, but its servers count on another prompt
            session = self.session = None
        if session is None:
            self._rows = [Row(index, 0) for index in range(self.rows)]
            return self._adopt(max(needed, limit), prompts)
        if needed <= limit:
            return session if session.is_open else self._move(limit)
        return self._move(max(needed, min(2 * limit, self._backend.max_length)))

    def _adopt(self, max_length: int, prompts: Prompts = ()) -> RemoteSession:
        loop = self._backend.loop
        opening = self._backend.open_session(len(self._rows), max_length, prompts)
        self.session = loop.run(opening, undo=RemoteSession.close)
        self._finalizer = weakref.finalize(self, _abandon, loop, self.session)
        return self.session

    def _move(self, max_length: int) -> RemoteSession:
        """Compute the past again in a larger session; a failed move can be tried again."""
        past = [list(self.entries(index)) for index in range(self.rows)]
        self._end_session()
        session = self._adopt(max_length)
        # In the new session's history from here on, whether its servers have it or not.
        self._rows = [Row(index, len(entries)) for index, entries in enumerate(past)]
        self._backend.loop.run(session.restore(past, self._backend.left_s()))
        return session


def embed_entries(
    embed: Embed, entries: Sequence[Entry], positions: Int[torch.Tensor, " T"]
) -> Float[torch.Tensor, "T D"]:
    """The rows of a history's entries at their positions, ids embedded anew."""
    known = [index for index, entry in enumerate(entries) if isinstance(entry, int)]
    given = {i: entry for i, entry in enumerate(entries) if isinstance(entry, torch.Tensor)}
    if not known:
        return torch.stack(list(given.values()))
    ids = torch.tensor([entries[index] for index in known], dtype=torch.long)
    embedded = embed(Tokens(ids), positions[known])
    if not given:
        return embedded
    given.update(zip(known, embedded, strict=True))
    return torch.stack([given[index] for index in range(len(entries))])


def _abandon(loop: LoopThread, session: RemoteSession) -> None:
    loop.post(session.close())


def _table(rows: Sequence[Row], counts: Sequence[int]) -> PackedTable:
    live = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
    if not live:
        raise RequestError("the step has no unmasked token: unmask at least one position")
    return PackedTable(
        tuple(row.sequence for row, _ in live),
        tuple(row.length for row, _ in live),
        tuple(count for _, count in live),
    )


def _ascending(table: PackedTable) -> list[int] | None:
    """The order that puts decode rows in order of their sequences, where KV lies side by side."""
    if not table.is_decode or all(a < b for a, b in pairwise(table.sequences)):
        return None
    return sorted(range(len(table.sequences)), key=table.sequences.__getitem__)


def _reordered(table: PackedTable, order: Sequence[int]) -> PackedTable:
    return PackedTable(
        tuple(table.sequences[i] for i in order),
        tuple(table.first_positions[i] for i in order),
        tuple(table.counts[i] for i in order),
    )
