"""A newcomer takes the blocks that the swarm covers least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.core import PeerId, Span
from bloombee.planner.placement import Newcomer, choose_span, spread


@pytest.mark.parametrize(
    ("capacity", "coverage", "chosen"),
    [
        (10, [0.0] * 30, "0:10"),  # empty swarm
        (10, [1.0] * 10 + [0.0] * 20, "10:20"),  # right beside what is held
        (10, [1.0] * 10 + [0.0] * 10 + [1.0] * 10, "10:20"),  # the gap
        (3, [0, 0, 5, 5, 0, 0, 0, 5], "4:7"),  # the gap that fits
        (2, [0, 1, 1, 0, 0], "3:5"),  # most of the weakest
        (3, [0, 0, 9, 1, 1, 0], "0:3"),  # two missing blocks before one
        (3, [0, 9, 9, 0, 1, 1], "3:6"),  # one missing either way: then the next weakest
        (2, [3, 2, 1, 2, 3], "1:3"),  # ties to the left
        (40, [1.0] * 30, "0:30"),  # more room than blocks
        (1, [5.0], "0:1"),
        (1, [2.0, 1.0, 1.0], "1:2"),
    ],
)
def test_table(capacity: int, coverage: list[float], chosen: str) -> None:
    assert choose_span(len(coverage), capacity, coverage) == Span.parse(chosen)


@given(
    coverage=st.lists(st.integers(0, 4).map(float), min_size=1, max_size=12),
    capacity=st.integers(1, 14),
)
def test_leaves_the_rest_of_the_swarm_as_strong_as_can_be(
    coverage: list[float], capacity: int
) -> None:
    width = min(capacity, len(coverage))

    def left_over(start: int) -> list[float]:
        """Coverage of the blocks the newcomer doesn't take, weakest first."""
        return sorted(coverage[:start] + coverage[start + width :])

    chosen = choose_span(len(coverage), capacity, coverage)
    assert len(chosen) == width
    starts = range(len(coverage) - width + 1)
    best = max(left_over(start) for start in starts)
    assert chosen.start == next(start for start in starts if left_over(start) == best)


@pytest.mark.parametrize(
    ("num_blocks", "capacity", "coverage"), [(0, 1, []), (3, 0, [1, 1, 1]), (3, 1, [1, 1])]
)
def test_nonsense_is_refused(num_blocks: int, capacity: int, coverage: list[float]) -> None:
    with pytest.raises(ValueError, match="block"):
        choose_span(num_blocks, capacity, coverage)


def test_servers_that_start_together_spread() -> None:
    newcomers = [Newcomer(PeerId(name), 10) for name in ("c", "a", "b", "d")]
    chosen = spread(30, [0.0] * 30, newcomers)
    assert {peer: str(span) for peer, span in chosen.items()} == {
        "a": "0:10",
        "b": "10:20",
        "c": "20:30",
        "d": "0:10",
    }
    assert spread(30, [0.0] * 30, newcomers[::-1]) == chosen


@given(servers=st.integers(1, 9), capacity=st.sampled_from([1, 2, 3, 6]))
def test_equal_newcomers_cover_evenly(servers: int, capacity: int) -> None:
    newcomers = [Newcomer(PeerId(f"{i}"), capacity) for i in range(servers)]
    chosen = spread(6, [0.0] * 6, newcomers)
    held = [sum(block in span for span in chosen.values()) for block in range(6)]
    rounds, rest = divmod(servers * capacity, 6)
    assert (min(held), max(held)) == (rounds, rounds + bool(rest))
