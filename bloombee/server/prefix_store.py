"""Chunks of finished prompts in host memory: found by key, dropped least recently used.

A chunk is what a stage holds of `PREFIX_TOKENS` tokens: their KV on all blocks of the
session, and their rows where there is a next stage. It belongs behind one other chunk, its
parent, or at the beginning. All chunks together take at most `limit_bytes`; one that
is in use, or has a child, is never dropped. No clock, no I/O; lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float

from bloombee.kv.ledger import ensure


@dataclass(frozen=True, slots=True)
class Content:
    """`kv`: of each block keys, then values. `rows`: as they were sent on."""

    kv: Float[torch.Tensor, "L 2 N K E"]
    rows: Float[torch.Tensor, "N D"] | None = None

    @property
    def total_bytes(self) -> int:
        """Memory that it takes."""
        return self.kv.nbytes + (0 if self.rows is None else self.rows.nbytes)


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk; `uses` and `children` keep it from being dropped."""

    key: bytes
    parent: Chunk | None
    content: Content
    children: int = 0
    uses: int = 0


class PrefixStore:
    """Chunks by key, the least recently used first and none before its children."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.dropped = 0
        self._chunks: dict[bytes, Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: bytes) -> Chunk | None:
        """The chunk of that key, if it is held."""
        return self._chunks.get(key)

    def find(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks of the first keys, as many as are held in that order; counts as use."""
        found: list[Chunk] = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.parent is not (found[-1] if found else None):
                break
            found.append(chunk)
        if found:
            self.touch(found[-1])
        return found

    def touch(self, chunk: Chunk) -> None:
        """Count a chunk, and those before it, as used last."""
        at: Chunk | None = chunk
        while at is not None:  # parents come after their children, so that those go first
            self._chunks[at.key] = self._chunks.pop(at.key)
            at = at.parent

    @contextmanager
    def use(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Keep held `chunks` from being dropped inside."""
        for chunk in chunks:
            chunk.uses += 1
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.uses -= 1

    def put(self, key: bytes, parent: Chunk | None, content: Content) -> Chunk | None:
        """Hold `content` behind `parent`; None when that isn't held, or there is no room.

        A chunk that is held already stays as it is. Drops others to make room.
        """
        held = self._chunks.get(key)
        if held is not None:
            return held if held.parent is parent else None
        if parent is not None and self._chunks.get(parent.key) is not parent:
            return None
        with self.use(() if parent is None else (parent,)):
            if not self._make_room(content.total_bytes):
                return None
        chunk = self._chunks[key] = Chunk(key, parent, content)
        self.held_bytes += content.total_bytes
        if parent is not None:
            parent.children += 1
        self.touch(chunk)
        return chunk

    def _make_room(self, needed_bytes: int) -> bool:
        """Drop chunks until so much is free; False when what is left may not be dropped."""
        if needed_bytes > self.limit_bytes:
            return False
        while self.held_bytes + needed_bytes > self.limit_bytes:
            free = (c for c in self._chunks.values() if not c.uses and not c.children)
            victim = next(free, None)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _drop(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        self.held_bytes -= chunk.content.total_bytes
        self.dropped += 1
        if chunk.parent is not None:
            chunk.parent.children -= 1

    def check(self) -> None:
        """Raise AssertionError for the first invariant that doesn't hold."""
        held = sum(chunk.content.total_bytes for chunk in self._chunks.values())
        ensure(held == self.held_bytes, f"{held} bytes held, {self.held_bytes} counted")
        ensure(held <= self.limit_bytes, f"{held} bytes held, {self.limit_bytes} allowed")
        children = dict.fromkeys(self._chunks, 0)
        for key, chunk in self._chunks.items():
            ensure(key == chunk.key and chunk.uses >= 0, f"chunk {key.hex()} is miscounted")
            if (parent := chunk.parent) is not None:
                ensure(self._chunks.get(parent.key) is parent, f"{key.hex()} has lost its parent")
                children[parent.key] += 1
        counted = all(chunk.children == children[key] for key, chunk in self._chunks.items())
        ensure(counted, "a chunk miscounts its children")
