"""The simulator against numbers worked out by hand, and Little's law."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.planner.jobs import Course, Job, Outcome, Station, Wire
from bloombee.planner.simulator import Simulation
from bloombee.planner.workload import Goal

if TYPE_CHECKING:
    from collections.abc import Sequence

PLENTY = 10**9


def _station(name: str, decode_s: float, prefill_s: float = 0.0, kv: int = PLENTY) -> Station:
    return Station(name, lambda _n, decode, _prefill: decode_s if decode else prefill_s, kv)


def _wire(name: str, busy_s: float, alpha_s: float) -> Wire:
    return Wire(name, lambda _d, _p: busy_s, lambda _d, _p: busy_s + alpha_s)


def _pipeline(
    stages_s: Sequence[float], wires: Sequence[tuple[float, float]], kv: int = PLENTY
) -> Simulation:
    """A ring of stages; `wires[i]` (busy, alpha) leads to stage i; prompts arrive at once."""
    stations = [_station(f"s{i}", seconds, seconds, kv) for i, seconds in enumerate(stages_s)]
    links = [_wire("entry", 0.0, 0.0), *(_wire(f"w{i}", *wire) for i, wire in enumerate(wires))]
    count = len(stages_s)
    course = Course(tuple(range(count)), (1,) * count, 0, tuple(range(1, count + 1)))
    return Simulation(stations, links, [course])


def _rate(outcome: Outcome) -> float:
    return outcome.tokens_per_s


times = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@settings(max_examples=60, deadline=None)
@given(
    stages=st.lists(times, min_size=1, max_size=4),
    data=st.data(),
    micro_batches=st.integers(1, 6),
)
def test_the_ring_runs_at_the_bottleneck_or_the_latency(
    stages: list[float], data: st.DataObject, micro_batches: int
) -> None:
    ends = st.lists(
        st.tuples(times, st.sampled_from([0.0, 1.0, 3.0])),
        min_size=len(stages),
        max_size=len(stages),
    )
    wires = data.draw(ends)
    outcome = _pipeline(stages, wires).run([Job(0, 4, 0, 60, 1)] * micro_batches)
    latency = sum(stages) + sum(busy + alpha for busy, alpha in wires)
    bottleneck = max(*stages, *(busy for busy, _ in wires))
    seconds = Goal.RING.seconds(latency, bottleneck, micro_batches)
    assert _rate(outcome) == pytest.approx(4 * micro_batches / seconds, rel=0.06)


def test_a_prompt_goes_through_in_chunks_that_follow_each_other() -> None:
    """Fill + (M - 1) x bottleneck."""
    simulation = _pipeline([1.0, 3.0, 2.0], [(0.0, 0.5)] * 3)
    outcome = simulation.run([Job(0, 2, 10, 1, 5)])
    fill = 1.0 + 3.0 + 2.0 + 2 * 0.5
    assert outcome.first_token_s == (fill + 3 * 3.0,)
    assert outcome.tokens == 2


def test_concurrency_is_what_the_kv_admits() -> None:
    """Little's law: twice the KV, twice the tokens, until a stage is always busy."""
    jobs = [Job(0, 1, 0, 50, 1)] * 24
    rates = [_rate(_pipeline([1.0], [(0.0, 9.0)], kv=50 * n).run(jobs)) for n in (1, 2, 4, 10, 20)]
    assert rates == pytest.approx([0.1, 0.2, 0.4, 1.0, 1.0], rel=0.05)


def test_more_capacity_with_less_kv_serves_less() -> None:
    """A layout with quicker stages isn't better when it admits fewer sequences."""
    jobs = [Job(0, 1, 0, 40, 1)] * 16
    quick = _pipeline([0.5], [(0.0, 9.5)], kv=40 * 2).run(jobs)
    roomy = _pipeline([1.0], [(0.0, 9.0)], kv=40 * 8).run(jobs)
    assert _rate(roomy) == pytest.approx(4 * _rate(quick), rel=0.1)
    assert max(quick.peak_kv) <= 80
    assert quick.mean_jobs <= 2


def test_waiting_passes_are_merged() -> None:
    station = replace(_station("s", 1.0), merged_rows=8)
    links = [_wire("entry", 0.0, 0.0), _wire("back", 0.0, 0.0)]
    course = Course((0,), (1,), 0, (1,))
    outcome = Simulation([station], links, [course]).run([Job(0, 1, 0, 20, 1)] * 4)
    alone = Simulation([_station("s", 1.0)], links, [course]).run([Job(0, 1, 0, 20, 1)] * 4)
    # The first comer starts alone; from then on it takes turns with the other three together.
    assert (outcome.end_s, alone.end_s) == (40.0, 80.0)


def test_jobs_wait_until_they_arrive_and_are_finished_in_order() -> None:
    jobs = [Job(0, 1, 0, 2, 1, arrival_s=5.0), Job(0, 1, 0, 2, 1)]
    outcome = _pipeline([1.0], [(0.0, 0.0)]).run(jobs)
    assert outcome.finished_s == (7.0, 2.0)
    assert outcome.busy_share["s0"] == pytest.approx(4 / 7)


def test_a_job_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="s0 has KV for 10"):
        _pipeline([1.0], [(0.0, 0.0)], kv=10).run([Job(0, 1, 0, 20, 1)])


def test_the_trace_shows_no_resource_twice_at_once() -> None:
    stations = [_station("a", 1.0), _station("b", 2.0)]
    links = [_wire(n, 0.5, 0.1) for n in ("entry", "back", "a -> b")]
    course = Course((0, 1), (1, 1), 0, (1, 2))
    outcome = Simulation(stations, links, [course], traced_s=30.0).run([Job(0, 1, 0, 10, 1)] * 3)
    for name in {busy.resource for busy in outcome.trace}:
        spans = sorted((b.start_s, b.end_s) for b in outcome.trace if b.resource == name)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
