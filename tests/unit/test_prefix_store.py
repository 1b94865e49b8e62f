"""Kept chunks against a plain account of them: what is found, what goes first, what stays."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bloombee.server.prefix_store import Chunk, Content, PrefixStore

LIMIT_BYTES = 100


def content(size: int = 10) -> Content:
    """Takes `size` bytes, an even number."""
    return Content(torch.zeros(1, 2, 1, 1, size // 2, dtype=torch.float8_e5m2))


def filled(*lines: bytes, limit_bytes: int = LIMIT_BYTES) -> PrefixStore:
    """Chunks by lines of one-letter keys, each behind the letter before it."""
    store = PrefixStore(limit_bytes)
    for line in lines:
        parent = None
        for index in range(len(line)):
            parent = store.put(line[index : index + 1], parent, content())
    return store


def keys(line: bytes) -> list[bytes]:
    return [line[i : i + 1] for i in range(len(line))]


def found(store: PrefixStore, line: bytes) -> bytes:
    return b"".join(chunk.key for chunk in store.find(keys(line)))


def test_as_much_as_is_held_from_the_beginning() -> None:
    store = filled(b"abc", b"abd")
    assert len(store) == 4 and store.held_bytes == 40
    assert found(store, b"abcx") == b"abc"
    assert found(store, b"abd") == b"abd"
    assert found(store, b"xabc") == b""


def test_a_chunk_counts_only_where_it_was_kept() -> None:
    store = filled(b"abc")
    assert found(store, b"bc") == b""
    assert found(store, b"ac") == b"a"
    assert found(store, b"aab") == b"a"


def test_the_least_recently_used_goes_first_and_children_before_parents() -> None:
    store = filled(b"abc", b"xyz", limit_bytes=70)
    assert found(store, b"abc") == b"abc"
    store.put(b"1", None, content(20))
    assert found(store, b"xyz") == b"xy"  # z was used least recently of those without children
    assert found(store, b"abc") == b"abc"
    store.put(b"2", None, content(20))
    assert store.get(b"1") is None and found(store, b"xy") == b"xy"
    assert store.dropped == 2
    store.check()


def test_a_chunk_in_use_stays() -> None:
    store = filled(b"abc", limit_bytes=30)
    with store.use(store.find(keys(b"abc"))):
        assert store.put(b"x", None, content()) is None
        assert found(store, b"abc") == b"abc"
    assert store.put(b"x", None, content()) is not None
    assert found(store, b"abc") == b"ab"
    store.check()


def test_a_parent_stays_while_room_is_made_for_its_child() -> None:
    store = filled(b"a", limit_bytes=15)
    parent = store.get(b"a")
    assert store.put(b"b", parent, content()) is None
    assert store.get(b"a") is parent
    store.check()


def test_nothing_is_kept_behind_what_was_dropped() -> None:
    store = filled(b"a", limit_bytes=15)
    gone = store.get(b"a")
    assert store.put(b"x", None, content()) is not None
    assert store.get(b"a") is None
    assert store.put(b"b", gone, content(2)) is None
    store.check()


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    store = filled(b"abc")
    assert store.put(b"x", None, content(LIMIT_BYTES + 2)) is None
    assert len(store) == 3
    assert PrefixStore(0).put(b"x", None, content()) is None


def test_a_key_that_is_held_stays_what_it_is() -> None:
    store = filled(b"ab")
    held = store.get(b"b")
    assert store.put(b"b", store.get(b"a"), content(50)) is held
    assert store.put(b"b", None, content()) is None
    assert store.held_bytes == 20


class Uses(RuleBasedStateMachine):
    """Random lines of chunks, kept, found and used."""

    def __init__(self) -> None:
        super().__init__()
        self.store = PrefixStore(60)
        self.stack: list[tuple[ExitStack, list[Chunk]]] = []

    @rule(
        line=st.lists(st.integers(0, 2), min_size=1, max_size=5), size=st.sampled_from((2, 10, 24))
    )
    def put(self, line: list[int], size: int) -> None:
        before = {key: self.store.get(key) for key in self._held()}
        parent: Chunk | None = None
        path = b""
        for step in line:
            path += bytes([step])
            chunk = self.store.put(path, parent, content(size))
            if chunk is None:
                break
            assert chunk.parent is parent
            parent = chunk
        used = {chunk.key for _, chunks in self.stack for chunk in chunks}
        assert all(self.store.get(key) is before[key] for key in used)

    @rule(line=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def find(self, line: list[int]) -> None:
        paths = [bytes(line[: n + 1]) for n in range(len(line))]
        held = 0
        while held < len(paths) and self.store.get(paths[held]) is not None:
            held += 1
        assert [chunk.key for chunk in self.store.find(paths)] == paths[:held]

    @rule(line=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def use(self, line: list[int]) -> None:
        chunks = self.store.find([bytes(line[: n + 1]) for n in range(len(line))])
        stack = ExitStack()
        stack.enter_context(self.store.use(chunks))
        self.stack.append((stack, chunks))

    @precondition(lambda self: bool(self.stack))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.stack) - 1))
        self.stack.pop(index)[0].close()

    @invariant()
    def whole(self) -> None:
        self.store.check()
        assert self.store.held_bytes <= 60
        for _, chunks in self.stack:
            assert all(self.store.get(chunk.key) is chunk for chunk in chunks)

    def _held(self) -> list[bytes]:
        return list(self.store._chunks)


TestUses = Uses.TestCase
TestUses.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
