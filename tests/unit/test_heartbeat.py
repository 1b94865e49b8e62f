"""Which stages count as silent, and that a network of our own that fails takes all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bloombee.client.heartbeat import silent
from bloombee.config.client import ClientSettings

SETTINGS = ClientSettings(silence_s=4.0, heartbeat_s=0.5)


def links(*ages_s: float) -> list[Any]:
    return [SimpleNamespace(heard_s=100.0 - age, way_s=0.0) for age in ages_s]


@pytest.mark.parametrize(
    ("ages_s", "missed"),
    [
        ((0.1, 0.4, 0.6), ()),
        ((3.9, 3.9, 3.9), ()),
        ((4.1, 0.2, 0.3), (0,)),
        ((3.4, 4.1, 3.6), (0, 1, 2)),
        ((2.9, 4.1, 3.6), (1, 2)),
    ],
)
def test_stages_that_fall_silent_within_a_beat_or_two_are_missed_together(
    ages_s: tuple[float, ...], missed: tuple[int, ...]
) -> None:
    seen = links(*ages_s)
    assert silent(seen, 100.0, SETTINGS) == [seen[index] for index in missed]


def test_silence_is_allowed_for_as_long_as_what_is_under_way_may_take() -> None:
    seen = links(6.5, 6.4, 0.1)
    seen[0].way_s = 3.0
    assert silent(seen, 100.0, SETTINGS) == []
    seen[0].way_s = 1.0
    assert silent(seen, 100.0, SETTINGS) == seen[:2]


def test_no_links_no_silence() -> None:
    assert silent([], 100.0, SETTINGS) == []
