"""The journal against a twin that keeps one list of rows a sequence."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import PackedTable
from bloombee.errors import ProtocolError
from bloombee.protocol.messages import Operations
from bloombee.server import journal as journal_module
from bloombee.server.journal import Journal, restored, whole

WIDTH = 2
SEQUENCES = 4


class Twin:
    """What a journal is, spelled out: one list of numbers a sequence."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = [[] for _ in range(SEQUENCES)]

    def append(self, table: PackedTable, rows: torch.Tensor) -> None:
        for row in table.rows():
            self.rows[row.sequence] += rows[row.offset : row.offset + row.count, 0].tolist()

    def operate(self, operations: Operations) -> None:
        before = [list(rows) for rows in self.rows]
        for destination, source in operations.forks:
            self.rows[destination] = list(before[source])
        for sequence, length in operations.truncates:
            del self.rows[sequence][length:]
        for sequence in operations.releases:
            self.rows[sequence] = []


Counts = st.dictionaries(
    st.integers(0, SEQUENCES - 1), st.sampled_from([1, 1, 1, 1, 2, 5]), min_size=1
)
Pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3)
Acts = st.lists(
    st.one_of(
        st.tuples(st.just("step"), Counts),
        st.tuples(st.just("decode"), st.tuples(st.integers(0, 2), st.integers(1, 9))),
        st.tuples(st.just("operate"), st.tuples(Pairs, Pairs, st.sets(st.integers(0, 3)))),
    ),
    max_size=40,
)
GROUPS = ((0, 1, 2, 3), (0, 1), (2,))


@given(
    acts=Acts,
    run_steps=st.sampled_from([1, 3, 64]),
    many=st.sampled_from([2, 5, 64]),
    small=st.sampled_from([0, 1 << 20]),
)
@settings(max_examples=200, deadline=None)
def test_it_holds_what_its_twin_holds(acts, run_steps, many, small) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "SMALL_STEP_BYTES", small)
        patch.setattr(journal_module, "RUN_STEPS", run_steps)
        patch.setattr(journal_module, "MANY_SEGMENTS", many)
        patch.setattr(journal_module, "LONG_ROWS", 8)
        live = _Life()
        for kind, what in acts:
            if kind == "step":
                live.step(what)
            elif kind == "decode":
                group, times = what
                for _ in range(times):
                    live.step(dict.fromkeys(GROUPS[group], 1))
            else:
                live.operate(*what)
            live.check()


class _Life:
    def __init__(self) -> None:
        self.journal = Journal(SEQUENCES, WIDTH, torch.float32)
        self.twin = Twin()
        self.next = 0.0

    def step(self, counts: dict[int, int]) -> None:
        firsts = tuple(len(self.twin.rows[sequence]) for sequence in counts)
        table = PackedTable(tuple(counts), firsts, tuple(counts.values()))
        rows = torch.arange(self.next, self.next + table.tokens)[:, None].repeat(1, WIDTH)
        self.next += table.tokens
        self.journal.append(table, rows)
        self.twin.append(table, rows)

    def operate(self, forks, cuts, releases) -> None:
        lengths = list(map(len, self.twin.rows))
        distinct = dict(forks)
        for destination, source in distinct.items():
            lengths[destination] = len(self.twin.rows[source])
        truncates = tuple((s, min(lengths[s], by)) for s, by in dict(cuts).items())
        operations = Operations(
            forks=tuple(distinct.items()), truncates=truncates, releases=tuple(releases)
        )
        self.journal.operate(operations)
        self.twin.operate(operations)

    def check(self) -> None:
        lengths = tuple(map(len, self.twin.rows))
        assert self.journal.lengths == lengths
        assert self.journal.row_bytes == sum(lengths) * WIDTH * 4
        held = {s: length for s, length in enumerate(lengths) if length}
        if not held:
            assert self.journal.held_bytes == 0
            return
        # All of it at once, and the later half of each.
        for part in (1, 2):
            firsts = tuple(length // part * (part - 1) for length in held.values())
            counts = tuple(n - first for n, first in zip(held.values(), firsts, strict=True))
            rows = self.journal.rows(PackedTable(tuple(held), firsts, counts))
            expected = [
                value
                for s, first in zip(held, firsts, strict=True)
                for value in self.twin.rows[s][first:]
            ]
            assert rows.shape == (len(expected), WIDTH)
            assert rows[:, 0].tolist() == rows[:, 1].tolist() == expected


def _decode(journal: Journal, sequences: int, steps: int) -> list[weakref.ref[torch.Tensor]]:
    kept = []
    for position in range(steps):
        rows = torch.full((sequences, WIDTH), float(position))
        kept.append(weakref.ref(rows))
        table = PackedTable(tuple(range(sequences)), (position,) * sequences, (1,) * sequences)
        journal.append(table, rows)
    return kept


def test_held_bytes_are_those_of_the_tensors_that_live() -> None:
    journal = Journal(2, WIDTH, torch.float32)
    outcomes = _decode(journal, 2, 10)
    gc.collect()
    assert [ref() is not None for ref in outcomes] == [True] * 10
    assert journal.held_bytes == journal.row_bytes == 10 * 2 * WIDTH * 4
    journal.operate(Operations(forks=((1, 0),)))
    gc.collect()
    # Joined into one tensor: the outcomes are gone, and the copy of 0 takes nothing.
    assert [ref() is not None for ref in outcomes] == [False] * 10
    assert journal.held_bytes == journal.row_bytes == 10 * 2 * WIDTH * 4
    journal.operate(Operations(truncates=((1, 0),), releases=(0,)))
    assert journal.held_bytes == journal.row_bytes == 0


def test_long_decoding_keeps_few_segments_and_no_outcome() -> None:
    journal = Journal(3, WIDTH, torch.float32)
    outcomes = _decode(journal, 3, 5000)
    gc.collect()
    assert sum(ref() is not None for ref in outcomes) < journal_module.RUN_STEPS
    assert max(map(len, journal._segments)) <= 5000 / 64 + journal_module.MANY_SEGMENTS
    assert journal.held_bytes == journal.row_bytes
    assert journal.rows(whole(5000, 1))[:, 0].tolist() == list(range(5000))


def test_large_steps_are_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SMALL_STEP_BYTES", 0)
    journal = Journal(3, WIDTH, torch.float32)
    outcomes = _decode(journal, 3, 1000)
    assert all(ref() is not None for ref in outcomes)
    assert journal.held_bytes == journal.row_bytes
    assert journal.rows(PackedTable((0, 2), (500, 10), (3, 2)))[:, 0].tolist() == [
        *(500, 501, 502),
        *(10, 11),
    ]


def test_a_row_of_a_merged_pass_does_not_keep_all_of_it() -> None:
    merged = torch.zeros(512, WIDTH)
    journal = Journal(1, WIDTH, torch.float32)
    journal.append(PackedTable((0,), (0,), (4,)), merged[100:104])
    assert journal.held_bytes == 4 * WIDTH * 4


def test_steps_that_do_not_follow_and_rows_that_are_not_there() -> None:
    journal = Journal(2, WIDTH, torch.float32)
    journal.append(PackedTable((0,), (0,), (3,)), torch.zeros(3, WIDTH))
    for table in (PackedTable((0,), (2,), (1,)), PackedTable((1,), (1,), (2,))):
        with pytest.raises(ProtocolError, match="a step starts at"):
            journal.append(table, torch.zeros(table.tokens, WIDTH))
    journal.append(PackedTable((0,), (3,), (1,)), torch.zeros(1, WIDTH))
    with pytest.raises(ProtocolError, match="a step starts at 5"):
        journal.append(PackedTable((0,), (5,), (1,)), torch.zeros(1, WIDTH))
    with pytest.raises(ProtocolError, match="rows 3:5 of sequence 0 are not in the journal"):
        journal.rows(PackedTable((0,), (3,), (2,)))


def test_restored_from_whole_sequences() -> None:
    rows = [torch.arange(6.0).view(3, WIDTH), torch.empty(0, WIDTH), torch.ones(1, WIDTH)]
    journal = restored(rows, WIDTH, torch.float32)
    assert journal.lengths == (3, 0, 1)
    assert torch.equal(
        journal.rows(PackedTable((0, 2), (1, 0), (2, 1))), torch.cat([rows[0][1:], rows[2]])
    )
