"""Who holds how much: sessions, lengths, and page reservations. No memory, no torch.

Every pool keeps its books here, so that both layouts count alike and refuse the
same calls. `Place` is whatever the pool needs to find a sequence's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bloombee.core import SessionId
from bloombee.errors import KVFull, RequestError
from bloombee.kv.interface import BatchItem

Place = TypeVar("Place")


def ensure(condition: bool, what: str) -> None:  # noqa: FBT001 - reads like assert
    """Raise AssertionError(what) unless the invariant holds."""
    if not condition:
        raise AssertionError(what)


@dataclass(slots=True, eq=False)
class Held(Generic[Place]):
    """One live sequence.

    While an import is under way, `loading` says how many of `loading_length` tokens
    each of its blocks holds; `in_pieces` when more than one call brings them.
    """

    place: Place
    length: int = 0
    in_flight: bool = False
    loading: dict[int, int] = field(default_factory=dict[int, int])
    loading_length: int = 0
    in_pieces: bool = False

    def end_import(self, length: int) -> None:
        """Hold `length` tokens; no import is under way."""
        self.length, self.loading_length, self.in_pieces = length, 0, False
        self.loading = {}


@dataclass(slots=True, eq=False)
class Account(Generic[Place]):
    """One session: its limit, what each sequence reserves, and the sequences by index."""

    max_length: int
    pages_each: int
    sequences: list[Held[Place] | None]


@dataclass(frozen=True, slots=True)
class StepRow(Generic[Place]):
    """One sequence's share of a step; `offset` is its first row in the packed batch."""

    held: Held[Place]
    first: int
    count: int
    offset: int
    parents: tuple[int, ...] | None

    @property
    def end(self) -> int:
        """Slots the sequence fills with this step's tokens."""
        return self.first + self.count


class Ledger(Generic[Place]):
    """The books of one pool, in pages of `page_tokens`; sequences end at `longest`."""

    def __init__(self, total_pages: int, page_tokens: int, longest: int) -> None:
        self.longest = longest
        self.total_pages = total_pages
        self.page_tokens = page_tokens
        self.free_pages = total_pages
        self.accounts: dict[SessionId, Account[Place]] = {}

    def admit(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> int:
        """Pages each sequence that isn't `released` would reserve; changes nothing.

        Raises RequestError (numbers not positive or too large, session exists) and KVFull.
        """
        if sequences < 1 or max_length < 1:
            raise RequestError(
                f"can't reserve {sequences} sequences of {max_length} tokens: both must be positive"
            )
        if max_length > self.longest:
            raise RequestError(
                f"a sequence of {max_length} tokens is longer than the {self.longest} served here"
            )
        if session in self.accounts:
            raise RequestError(f"session {session.hex()} is already open; close it first")
        if not set(released) <= set(range(sequences)):
            raise RequestError(f"{sorted(released)} released of only {sequences} sequences")
        pages = -(-max_length // self.page_tokens)
        live = sequences - len(set(released))
        if live * pages > self.free_pages:
            asked = live * pages * self.page_tokens
            free = self.free_pages * self.page_tokens
            raise KVFull(
                f"{asked} KV tokens asked for ({live} sequences of {max_length}), "
                f"{free} of {self.total_pages * self.page_tokens} free; "
                "ask for less or wait for a session to end"
            )
        return pages

    def open(self, session: SessionId, max_length: int, places: Sequence[Place | None]) -> None:
        """Take the pages that `admit` allowed, one share for each place; None is released."""
        released = [index for index, place in enumerate(places) if place is None]
        pages = self.admit(session, len(places), max_length, released)
        self.free_pages -= pages * (len(places) - len(released))
        sequences = [None if place is None else Held(place) for place in places]
        self.accounts[session] = Account(max_length, pages, sequences)

    def close(self, session: SessionId) -> list[Held[Place]]:
        """Forget the session; returns its live sequences. Empty for unknown sessions.

        Raises RequestError while one of them has a step in flight.
        """
        account = self.accounts.get(session)
        if account is None:
            return []
        live = [held for held in account.sequences if held is not None]
        if any(held.in_flight for held in live):
            raise RequestError(f"session {session.hex()} has a step in flight; abort it first")
        del self.accounts[session]
        self.free_pages += account.pages_each * len(live)
        return live

    def release(self, session: SessionId, sequence: int) -> Held[Place]:
        """Give one idle sequence's pages back; returns what it was."""
        held = self.idle(session, sequence)
        account = self.accounts[session]
        account.sequences[sequence] = None
        self.free_pages += account.pages_each
        return held

    def account(self, session: SessionId) -> Account[Place]:
        """The session's account. Raises RequestError when it is not open."""
        account = self.accounts.get(session)
        if account is None:
            raise RequestError(f"session {session.hex()} is not open here; open it first")
        return account

    def held(self, session: SessionId, sequence: int) -> Held[Place]:
        """A live sequence. Raises RequestError for unknown or released ones."""
        sequences = self.account(session).sequences
        held = sequences[sequence] if 0 <= sequence < len(sequences) else None
        if held is None:
            raise RequestError(
                f"session {session.hex()} has no sequence {sequence} "
                f"(it opened {len(sequences)}; released ones are gone)"
            )
        return held

    def idle(self, session: SessionId, sequence: int) -> Held[Place]:
        """A live sequence that no step is changing. Raises RequestError otherwise."""
        held = self.held(session, sequence)
        if held.in_flight:
            raise RequestError(
                f"sequence {sequence} of session {session.hex()} has a step in flight; "
                "finish or abort it first"
            )
        return held

    def lengths(self, session: SessionId) -> tuple[int, ...]:
        """Held tokens of each sequence, 0 for released ones."""
        return tuple(0 if held is None else held.length for held in self.account(session).sequences)

    def forks(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> dict[int, int]:
        """`copies` as destination -> source, without those that change nothing.

        Raises RequestError for repeated destinations, unknown and busy sequences.
        """
        wanted = dict(copies)
        if len(wanted) != len(copies):
            raise RequestError(f"a fork names a destination twice: {list(copies)}")
        for pair in copies:
            for sequence in pair:
                if self.idle(session, sequence).loading:
                    raise RequestError(f"sequence {sequence} is being loaded and can't be forked")
        return {to: source for to, source in wanted.items() if to != source}

    def shorter(self, session: SessionId, sequence: int, length: int) -> Held[Place]:
        """The idle sequence that is to shrink to `length`.

        Raises RequestError when it holds fewer tokens or length is negative.
        """
        held = self.idle(session, sequence)
        if not 0 <= length <= held.length:
            raise RequestError(
                f"sequence {sequence} holds {held.length} tokens and can't be cut to {length}"
            )
        return held

    def kept(
        self, session: SessionId, sequence: int, first: int, kept: Sequence[int]
    ) -> Held[Place]:
        """The idle sequence of which `first` tokens and `first + i` for i in kept remain.

        Raises RequestError unless `kept` ascends within what is held.
        """
        held = self.shorter(session, sequence, first)
        ascending = all(low < high for low, high in zip((-1, *kept), kept, strict=False))
        if not ascending or (kept and first + kept[-1] >= held.length):
            raise RequestError(
                f"can't keep {list(kept)} after {first} of {held.length} tokens "
                f"of sequence {sequence}: indices must ascend within what is held"
            )
        return held

    def start(self, batch: Sequence[BatchItem]) -> list[StepRow[Place]]:
        """Check the whole batch, then let its sequences grow; nothing changes on error."""
        rows: list[StepRow[Place]] = []
        base = 0
        for item in batch:
            rows += self._item_rows(item, base)
            base += item.table.tokens
        if len({id(row.held) for row in rows}) != len(rows):
            raise RequestError("a batch names the same sequence twice")
        if not rows:
            raise RequestError("a batch needs at least one sequence")
        for row in rows:
            row.held.length = row.end
            row.held.in_flight = True
        return rows

    def _item_rows(self, item: BatchItem, base: int) -> list[StepRow[Place]]:
        limit = self.account(item.session).max_length
        rows: list[StepRow[Place]] = []
        for row in item.table.rows():
            held = self.idle(item.session, row.sequence)
            if held.loading or row.first_position != held.length:
                raise RequestError(
                    f"sequence {row.sequence} of session {item.session.hex()} holds "
                    f"{held.length} tokens, the step starts at {row.first_position}"
                    + (" and an import is unfinished" if held.loading else "")
                )
            if held.length + row.count > limit:
                raise RequestError(
                    f"{row.count} tokens after {held.length} pass max_length {limit} "
                    f"of session {item.session.hex()}; open it with a larger one"
                )
            offset = base + row.offset
            rows.append(StepRow(held, row.first_position, row.count, offset, row.parents))
        return rows

    def settle(self, rows: Sequence[StepRow[Place]], *, keep_tokens: bool) -> None:
        """End a step: its tokens stay, or its sequences are as before `start`."""
        for row in rows:
            row.held.in_flight = False
            if not keep_tokens:
                row.held.length = row.first

    def expect(
        self, session: SessionId, sequence: int, tokens: int, blocks: Sequence[int]
    ) -> Held[Place]:
        """Begin an import of `tokens` on `blocks` into an empty sequence, in pieces.

        Raises RequestError when it is not empty or too small.
        """
        held = self.idle(session, sequence)
        limit = self.account(session).max_length
        if held.length or held.loading or not 0 < tokens <= limit:
            raise RequestError(
                f"can't load {tokens} tokens into sequence {sequence}, which holds {held.length} "
                f"and takes up to {limit}; truncate it to 0 or open a longer session"
            )
        held.loading, held.loading_length = dict.fromkeys(blocks, 0), tokens
        held.in_pieces = True
        return held

    def loads(
        self, session: SessionId, sequence: int, block: int, tokens: int, blocks: Sequence[int]
    ) -> tuple[Held[Place], int]:
        """The sequence, and the slot from which `tokens` more may be written on `block`.

        Without `expect` before it, the whole of an import of `tokens` on `blocks` begins.
        Raises RequestError when they don't fit or blocks disagree.
        """
        held = self.idle(session, sequence)
        if not held.loading:
            held = self.expect(session, sequence, tokens, blocks)
            held.in_pieces = False
        first = held.loading.get(block, held.loading_length)
        left = held.loading_length - first
        if not 0 < tokens <= left or (tokens < left and not held.in_pieces):
            raise RequestError(
                f"block {block} of sequence {sequence} takes {left} more tokens of "
                f"{held.loading_length}, not {tokens}"
            )
        return held, first

    def note_loaded(self, held: Held[Place], block: int, tokens: int) -> None:
        """`tokens` more are written on `block`; the sequence holds all with the last of them."""
        held.loading[block] += tokens
        if all(count == held.loading_length for count in held.loading.values()):
            held.end_import(held.loading_length)

    def exported(self, session: SessionId, sequence: int, start: int, stop: int) -> Held[Place]:
        """A live sequence that holds slots `[start, stop)`. Raises RequestError otherwise."""
        held = self.held(session, sequence)
        if not 0 <= start <= stop <= held.length:
            raise RequestError(
                f"slots {start}:{stop} of sequence {sequence}: it holds {held.length} tokens"
            )
        return held

    def check(self) -> None:
        """Verify the books; raises AssertionError naming the first broken invariant."""
        reserved = 0
        for session, account in self.accounts.items():
            live = [held for held in account.sequences if held is not None]
            reserved += account.pages_each * len(live)
            room = account.pages_each * self.page_tokens
            ensure(account.max_length <= room, f"{session.hex()}: reserved less than its limit")
            for held in live:
                fits = 0 <= held.length <= account.max_length
                ensure(fits, f"{session.hex()}: length {held.length} passes its limit")
                ensure(not (held.loading and held.length), f"{session.hex()}: loads over tokens")
        ensure(
            self.free_pages == self.total_pages - reserved,
            f"{self.free_pages} pages free, {self.total_pages} - {reserved} expected",
        )
