"""How many micro-batches a batch decodes in: by what is known of stages, links and cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.planner.micro_batching import (
    NEARLY,
    HopFacts,
    Pipeline,
    StageFacts,
    decode_count,
    pipeline_of,
    prompt_parts,
    round_s,
    usual_count,
)

ROW_BYTES = 1152
FREE = HopFacts(alpha_s=0.0001, bytes_per_s=1e9, row_bytes=ROW_BYTES)


def stages(pace: float = 1.0, machine: str = "", cores: int = 0) -> tuple[StageFacts, ...]:
    """Three stages of ten blocks of SmolLM2 in bfloat16 (MEASURED 4), paced or not."""
    facts = StageFacts(
        first_s=pace * 6.4e-3, row_s=pace * 0.62e-3, pace=pace, machine=machine, cores=cores
    )
    return (facts,) * 3


def hops(mbps: float, rtt_ms: float) -> tuple[HopFacts, ...]:
    hop = HopFacts(alpha_s=rtt_ms / 2e3, bytes_per_s=mbps * 1e6 / 8, row_bytes=ROW_BYTES)
    return (hop,) * 2


def test_stages_that_share_two_cores_take_fewer_groups_than_machines_of_their_own() -> None:
    shared = Pipeline(stages(machine="here", cores=2), (FREE, FREE))
    assert decode_count(32, shared).count == 2
    paced = Pipeline(stages(4.0, "here", 2), (FREE, FREE))
    assert decode_count(32, paced).count == 4
    assert decode_count(32, Pipeline(stages(), (FREE, FREE))).count in (3, 4)


@pytest.mark.parametrize("mbps", [1e4, 17, 4.9, 2.7, 0.44])
@pytest.mark.parametrize("rtt_ms", [0, 20, 80])
def test_slow_links_want_more_groups_than_stages(mbps: float, rtt_ms: float) -> None:
    found = decode_count(32, Pipeline(stages(4.0), hops(mbps, rtt_ms), rtt_ms / 2e3))
    assert 3 <= found.count <= 8
    assert "of 32 rows" in found.reason


def test_batches_that_can_not_be_split_are_not() -> None:
    route = Pipeline(stages(), (FREE, FREE))
    assert [decode_count(rows, route).count for rows in (1, 4, 7)] == [1, 1, 1]
    assert decode_count(64, Pipeline(stages()[:1], ())).count == 1


_STAGE = st.builds(
    StageFacts,
    first_s=st.floats(1e-4, 0.5),
    row_s=st.floats(0, 0.05),
    pace=st.floats(1, 10),
    machine=st.sampled_from(["", "a", "b"]),
    cores=st.integers(0, 64),
)
_HOP = st.builds(
    HopFacts,
    alpha_s=st.floats(0, 0.2),
    bytes_per_s=st.floats(1e4, 1e10),
    row_bytes=st.floats(100, 20_000),
)


@given(st.integers(1, 128), st.lists(st.tuples(_STAGE, _HOP), min_size=1, max_size=6))
def test_no_count_is_much_better(rows: int, route: list[tuple[StageFacts, HopFacts]]) -> None:
    whole = Pipeline(tuple(s for s, _ in route), tuple(hop for _, hop in route[1:]), 0.01)
    found = decode_count(rows, whole).count
    assert 1 <= found <= max(1, rows // 4)
    usual = min(usual_count(rows, len(route)), 2 * len(route) + 2)
    for other in {1, usual}:
        assert round_s(rows, found, whole) <= NEARLY * round_s(rows, other, whole) + 1e-12


def test_prompts_are_cut_where_stages_overlap() -> None:
    route = Pipeline(stages(), (FREE, FREE))
    assert prompt_parts(100, route).count == 1
    assert prompt_parts(4096, route).count > 4
    assert prompt_parts(4096, Pipeline(stages()[:1], ())).count == 1


def test_what_is_not_known_is_not_guessed() -> None:
    stage = stages()[0]
    assert pipeline_of([stage, None], [FREE], 0.0) is None
    assert pipeline_of([stage, stage], [None], 0.0) is None
    assert pipeline_of([stage, stage], [FREE], 0.0) == Pipeline((stage, stage), (FREE,), 0.0)
