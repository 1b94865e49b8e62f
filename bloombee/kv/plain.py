"""The obviously right pool: a list of tensors per sequence, float32, explicit masks.

Only tests use it, to hold the fast layouts to. It shares no code with them but
the interface: its own accounting, and visibility decided token by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float

from bloombee.core import SessionId, Span
from bloombee.errors import KVFull, RequestError
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape

Stored = list[Float[torch.Tensor, "K E"]]


@dataclass(slots=True, eq=False)
class PlainSequence:
    """Keys and values per block, one tensor per token; `expected` while loaded in pieces."""

    length: int = 0
    keys: dict[int, Stored] = field(default_factory=dict[int, Stored])
    values: dict[int, Stored] = field(default_factory=dict[int, Stored])
    expected: tuple[int, range] | None = None

    def select(self, tokens: Sequence[int]) -> PlainSequence:
        """A copy that holds only these tokens."""
        return PlainSequence(
            len(tokens),
            {block: [stored[i] for i in tokens] for block, stored in self.keys.items()},
            {block: [stored[i] for i in tokens] for block, stored in self.values.items()},
        )


@dataclass(slots=True, eq=False)
class PlainSession:
    """What `reserve` promised."""

    max_length: int
    sequences: list[PlainSequence | None]


@dataclass(frozen=True, slots=True)
class PlainRow:
    """One sequence of a step."""

    sequence: PlainSequence
    first: int
    offset: int
    lineages: list[set[int]]

    def position(self, token: int) -> int:
        """Position of new token `token`: as many new ancestors, so much deeper."""
        return self.first + len(self.lineages[token]) - 1


def _lineages(parents: Sequence[int]) -> list[set[int]]:
    """Each new token with its ancestors among the new ones."""
    lineages: list[set[int]] = []
    for token, parent in enumerate(parents):
        lineages.append({token} | (lineages[parent] if parent >= 0 else set()))
    return lineages


class PlainPlan(AttendPlan):
    """The rows."""

    def __init__(self, rows: list[PlainRow]) -> None:
        self.rows = rows


class PlainPool(KVPool):
    """See the module."""

    def __init__(self, shape: KVShape, total_tokens: int, page_tokens: int) -> None:
        self.shape = shape
        self.page_tokens = page_tokens
        self._total = total_tokens
        self._sessions: dict[SessionId, PlainSession] = {}

    @property
    def total_tokens(self) -> int:
        return self._total

    @property
    def free_tokens(self) -> int:
        used = 0
        for session in self._sessions.values():
            live = sum(sequence is not None for sequence in session.sequences)
            used += live * -(-session.max_length // self.page_tokens)
        return self._total - used * self.page_tokens

    def reserve(
        self,
        session: SessionId,
        sequences: int,
        max_length: int,
        released: Collection[int] = (),
    ) -> None:
        if session in self._sessions or sequences < 1 or max_length < 1:
            raise RequestError("the session exists or a number is not positive")
        asked = (
            (sequences - len(set(released))) * -(-max_length // self.page_tokens) * self.page_tokens
        )
        if asked > self.free_tokens:
            raise KVFull(f"{asked} tokens asked for, {self.free_tokens} free")
        held = [None if i in released else PlainSequence() for i in range(sequences)]
        self._sessions[session] = PlainSession(max_length, held)

    def max_length(self, session: SessionId) -> int:
        """What the session reserved for each sequence."""
        return self._sessions[session].max_length

    def free(self, session: SessionId) -> None:
        self._sessions.pop(session, None)

    def release(self, session: SessionId, sequence: int) -> None:
        self._sequence(session, sequence)
        self._sessions[session].sequences[sequence] = None

    def _sequence(self, session: SessionId, sequence: int) -> PlainSequence:
        found = self._sessions.get(session)
        if found is None or not 0 <= sequence < len(found.sequences):
            raise RequestError("unknown session or sequence")
        held = found.sequences[sequence]
        if held is None:
            raise RequestError("the sequence was released")
        return held

    def lengths(self, session: SessionId) -> tuple[int, ...]:
        sequences = self._sessions[session].sequences
        return tuple(held.length if held else 0 for held in sequences)

    def fork(self, session: SessionId, copies: Sequence[tuple[int, int]]) -> None:
        if len({to for to, _ in copies}) != len(copies):
            raise RequestError("a destination is named twice")
        copied: dict[int, PlainSequence] = {}
        for to, source in copies:
            self._sequence(session, to)
            held = self._sequence(session, source)
            copied[to] = held.select(range(held.length))
        for to, sequence in copied.items():
            self._sessions[session].sequences[to] = sequence

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        held = self._sequence(session, sequence)
        if not 0 <= length <= held.length:
            raise RequestError("fewer tokens are held")
        self._sessions[session].sequences[sequence] = held.select(range(length))

    def keep(self, session: SessionId, sequence: int, first: int, kept: Sequence[int]) -> None:
        held = self._sequence(session, sequence)
        tokens = [*range(first), *(first + index for index in kept)]
        if tokens != sorted(set(tokens)) or (tokens and tokens[-1] >= held.length):
            raise RequestError("kept tokens must ascend and be held")
        self._sessions[session].sequences[sequence] = held.select(tokens)

    def begin(self, batch: Sequence[BatchItem]) -> PlainPlan:
        rows: list[PlainRow] = []
        base = 0
        for item in batch:
            for row in item.table.rows():
                held = self._sequence(item.session, row.sequence)
                limit = self._sessions[item.session].max_length
                if row.first_position != held.length or held.length + row.count > limit:
                    raise RequestError("the row starts elsewhere or passes max_length")
                parents = list(row.parents or range(-1, row.count - 1))
                offset = base + row.offset
                rows.append(PlainRow(held, held.length, offset, _lineages(parents)))
            base += item.table.tokens
        for row in rows:
            row.sequence.length += len(row.lineages)
        return PlainPlan(rows)

    def attend(  # noqa: PLR0913 - what attention takes everywhere
        self,
        plan: AttendPlan,
        block: int,
        query: Float[torch.Tensor, "T H E"],
        key: Float[torch.Tensor, "T K E"],
        value: Float[torch.Tensor, "T K E"],
        *,
        scaling: float,
        window: int | None = None,
    ) -> Float[torch.Tensor, "T H E"]:
        out = torch.empty_like(query)
        for row in plan.rows if isinstance(plan, PlainPlan) else ():
            new = range(row.offset, row.offset + len(row.lineages))
            keys = row.sequence.keys.setdefault(block, [])
            values = row.sequence.values.setdefault(block, [])
            keys += [key[index].clone() for index in new]
            values += [value[index].clone() for index in new]
            for token, index in enumerate(new):
                here = row.position(token)
                positions = dict(enumerate(range(row.first)))
                positions |= {row.first + t: row.position(t) for t in row.lineages[token]}
                seen = [s for s, at in positions.items() if window is None or at > here - window]
                near = torch.stack([keys[slot] for slot in seen])
                told = torch.stack([values[slot] for slot in seen])
                out[index] = _attend_one(query[index], near, told, scaling).to(query.dtype)
        return out

    def finish(self, plan: AttendPlan) -> None:
        pass

    def abort(self, plan: AttendPlan) -> None:
        for row in plan.rows if isinstance(plan, PlainPlan) else ():
            row.sequence.length = row.first
            for stored in (*row.sequence.keys.values(), *row.sequence.values.values()):
                del stored[row.first :]

    def export(
        self, session: SessionId, sequence: int, block: int, start: int, stop: int
    ) -> tuple[Float[torch.Tensor, "N K E"], Float[torch.Tensor, "N K E"]]:
        held = self._sequence(session, sequence)
        if not 0 <= start < stop <= held.length:
            raise RequestError("fewer tokens are held")
        return (
            torch.stack(held.keys[block][start:stop]),
            torch.stack(held.values[block][start:stop]),
        )

    def expect(
        self, session: SessionId, sequence: int, tokens: int, span: Span | None = None
    ) -> None:
        held = self._sequence(session, sequence)
        if (
            held.length
            or any(held.keys.values())
            or not 0 < tokens <= self._sessions[session].max_length
        ):
            raise RequestError("the sequence is not empty, or too short for so much")
        held.expected = tokens, self.shape.blocks(span)

    def load(
        self,
        session: SessionId,
        sequence: int,
        block: int,
        key: Float[torch.Tensor, "N K E"],
        value: Float[torch.Tensor, "N K E"],
    ) -> None:
        held = self._sequence(session, sequence)
        if held.length or (held.keys.get(block) and held.expected is None):
            raise RequestError("the sequence is not empty")
        tokens, blocks = held.expected or (len(key), self.shape.blocks())
        if block not in blocks or len(held.keys.get(block, ())) + len(key) > tokens:
            raise RequestError("more than was expected")
        held.keys.setdefault(block, []).extend(key.clone())
        held.values.setdefault(block, []).extend(value.clone())
        if all(len(held.keys.get(each, [])) == tokens for each in blocks):
            held.length, held.expected = tokens, None

    def check_integrity(self) -> None:
        pass


def _attend_one(
    query: Float[torch.Tensor, "H E"],
    keys: Float[torch.Tensor, "N K E"],
    values: Float[torch.Tensor, "N K E"],
    scaling: float,
) -> Float[torch.Tensor, "H E"]:
    group = query.shape[0] // keys.shape[1]
    wide = [stored.float().repeat_interleave(group, dim=1) for stored in (keys, values)]
    scores = torch.einsum("he,nhe->hn", query.float(), wide[0]) * scaling
    return torch.einsum("hn,nhe->he", torch.softmax(scores, -1), wide[1])
