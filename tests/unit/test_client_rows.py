"""Rows to sequences: whatever `generate` does to its batch, each row finds its own past."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.client.history import History
from bloombee.client.rows import Row, resolve
from bloombee.client.split import Want, part_tokens, split
from bloombee.core import PackedTable
from bloombee.errors import RequestError
from bloombee.protocol.messages import Operations


def test_rows_that_stay_cost_nothing() -> None:
    found = resolve([Row(0, 5), Row(1, 5)], [5, 5])
    assert found.rows == (Row(0, 5), Row(1, 5))
    assert found.operations == Operations()


def test_a_permutation_costs_nothing() -> None:
    found = resolve([Row(2, 5), Row(0, 5), Row(1, 5)], [5, 5, 5])
    assert [row.sequence for row in found.rows] == [2, 0, 1]
    assert found.operations == Operations()


def test_a_dropped_beam_makes_room_for_a_fork() -> None:
    found = resolve([Row(0, 5), Row(0, 5), Row(2, 5)], [5, 5, 5])
    assert [row.sequence for row in found.rows] == [0, 1, 2]
    assert found.operations == Operations(forks=((1, 0),))


def test_a_shortened_row_is_truncated_and_its_fork_as_well() -> None:
    found = resolve([Row(0, 3), Row(0, 5)], [5, 1])
    assert found.operations == Operations(forks=((1, 0),), truncates=((0, 3),))


def test_more_rows_than_sequences_are_refused() -> None:
    with pytest.raises(RequestError, match="3 rows need more than the session's 2 sequences"):
        resolve([Row(0, 1)] * 3, [1, 0])


@given(st.data())
def test_every_row_gets_exactly_its_past(data: st.DataObject) -> None:
    """Any rows over any held lengths: the servers' work leaves each row its own copy."""
    held = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    history = History(len(held))
    for sequence, length in enumerate(held):
        if length:
            ids = [100 * sequence + i for i in range(length)]
            history.append(PackedTable((sequence,), (0,), (length,)), ids)
    rows = data.draw(
        st.lists(
            st.integers(0, len(held) - 1).flatmap(
                lambda s: st.builds(Row, st.just(s), st.integers(0, held[s]))
            ),
            min_size=1,
            max_size=len(held),
        )
    )
    expected = [list(history.entries(row.sequence))[: row.length] for row in rows]
    found = resolve(rows, held)
    history.apply(found.operations)
    sequences = [row.sequence for row in found.rows]
    assert len(set(sequences)) == len(rows)
    assert [list(history.entries(s)) for s in sequences] == expected


def test_a_prompt_is_cut_so_that_stages_overlap() -> None:
    assert part_tokens(1500, stages=3, least=256, limit=2048) == 256
    assert part_tokens(6000, stages=3, least=256, limit=2048) == 1000
    assert part_tokens(6000, stages=1, least=256, limit=2048) == 2048
    assert part_tokens(60_000, stages=3, least=256, limit=2048) == 2048


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 12))
def test_parts_cover_the_table_and_answer_what_was_asked(counts: list[int], size: int) -> None:
    firsts = tuple(range(len(counts)))
    table = PackedTable(tuple(range(len(counts))), firsts, tuple(counts))
    asked: dict[Want, int] = {"all": table.tokens, "last": len(counts), "none": 0}
    for want, rows in asked.items():
        parts = list(split(table, want, size))
        assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, table.tokens)
        assert max(p.stop - p.start for p in parts) <= size
        assert sum(part.kept for part in parts) == rows
        if want == "last":
            kept = [s for p in parts for s in p.table.sequences[: p.kept]]
            assert kept == list(table.sequences)
            assert all((p.wants == "none") == (p.kept == 0) for p in parts)


def test_a_draft_tree_is_never_cut() -> None:
    table = PackedTable((0,), (4,), (3,), parents=(-1, 0, 0))
    assert [p.stop for p in split(table, "all", 1)] == [3]
