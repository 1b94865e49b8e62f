"""Spans, routes and the packed table against naive references."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.core import PackedTable, PeerId, Route, Span, Stage
from bloombee.errors import BloomBeeError, KVFull, from_code


def test_span_reads_what_it_writes():
    assert Span.parse("0:10") == Span(0, 10)
    assert str(Span(3, 7)) == "3:7"
    assert len(Span(3, 7)) == 4
    assert 3 in Span(3, 7)
    assert 7 not in Span(3, 7)
    assert Span(0, 10).covers(Span(3, 7))
    assert not Span(4, 10).covers(Span(3, 7))


@pytest.mark.parametrize("text", ["", "3", "a:b", "5:5", "7:3", "-1:4", "0-10"])
def test_span_refuses_what_is_no_range(text: str):
    with pytest.raises(ValueError, match=r"START:END|0 <= start < end"):
        Span.parse(text)


def test_route_joins_or_says_where_it_does_not():
    stages = tuple(Stage(PeerId("peer"), Span(a, b)) for a, b in ((0, 2), (2, 5)))
    assert Route(stages).span == Span(0, 5)
    with pytest.raises(ValueError, match="2:5 is followed by 0:2"):
        Route(stages[::-1])
    with pytest.raises(ValueError, match="at least one"):
        Route(())


def test_positions_follow_chains_and_depths():
    table = PackedTable((4, 1), (10, 0), (3, 2))
    assert table.positions.tolist() == [10, 11, 12, 0, 1]
    assert table.last_rows.tolist() == [2, 4]
    tree = PackedTable((4, 1), (10, 0), (4, 2), parents=(-1, 0, 0, 2, -1, -1))
    assert tree.positions.tolist() == [10, 11, 11, 12, 0, 0]
    assert [row.parents for row in tree.rows()] == [(-1, 0, 0, 2), (-1, -1)]


@pytest.mark.parametrize(
    ("sequences", "firsts", "counts", "parents"),
    [
        ((), (), (), None),
        ((0,), (0, 1), (1,), None),
        ((0, 0), (0, 1), (1, 1), None),
        ((-1,), (0,), (1,), None),
        ((0,), (-1,), (1,), None),
        ((0,), (0,), (0,), None),
        ((0,), (0,), (2,), (-1,)),
        ((0,), (0,), (2,), (0, 0)),
        ((0, 1), (0, 0), (1, 1), (-1, 0)),
    ],
)
def test_broken_tables_are_refused(sequences, firsts, counts, parents):
    with pytest.raises(ValueError, match=r"\w"):
        PackedTable(sequences, firsts, counts, parents)


tables = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6)


def slots(table: PackedTable) -> list[tuple[int, int]]:
    """Sequence and KV slot of every packed token."""
    return [
        (row.sequence, row.first_position + index)
        for row in table.rows()
        for index in range(row.count)
    ]


@given(rows=tables, data=st.data())
def test_select_takes_exactly_the_tokens_asked_for(rows, data):
    table = PackedTable(
        tuple(range(len(rows))), tuple(f for f, _ in rows), tuple(c for _, c in rows)
    )
    tokens = [
        (row.sequence, row.first_position + i) for row in table.rows() for i in range(row.count)
    ]
    start = data.draw(st.integers(0, table.tokens - 1))
    stop = data.draw(st.integers(start + 1, table.tokens))
    part = table.select(start, stop)
    chosen = [
        (row.sequence, row.first_position + i) for row in part.rows() for i in range(row.count)
    ]
    assert chosen == tokens[start:stop]


@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=4), data=st.data())
def test_depths_count_ancestors(counts, data):
    parents = [data.draw(st.integers(-1, i - 1)) for count in counts for i in range(count)]
    table = PackedTable(
        tuple(range(len(counts))), tuple(0 for _ in counts), tuple(counts), tuple(parents)
    )
    for row in table.rows():
        for index in range(row.count):
            depth, node = 0, index
            while row.parents is not None and (node := row.parents[node]) >= 0:
                depth += 1
            assert table.depths[row.offset + index] == depth


def test_errors_travel_by_code():
    error = from_code(KVFull.code, "3 free, 5 asked for")
    assert type(error) is KVFull
    assert error.retry
    assert str(error) == "3 free, 5 asked for"
    assert type(from_code("a code of tomorrow", "x")) is BloomBeeError
