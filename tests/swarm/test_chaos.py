"""Whole swarms under seeded faults: the answers are those of an undisturbed swarm, nothing leaks.

Each seed is a swarm, its clients' scripts, and a schedule of faults, run in virtual
time. A seed that fails is run alone, with its schedule and the full log, by

    pytest tests/swarm/test_chaos.py --fault-seed N
"""

from __future__ import annotations

from tests.swarm.chaos.drive import make_case, run_case

UNDISTURBED = 40


def test_without_faults_every_client_gets_the_right_answers() -> None:
    for seed in range(UNDISTURBED):
        report = run_case(make_case(seed, disturbed=False))
        assert not report.problems, report
        assert not report.errors, report


def test_the_same_seed_gives_the_same_events_in_the_same_order() -> None:
    for seed in range(5):
        first, again = (run_case(make_case(seed, disturbed=False)) for _ in range(2))
        assert first.events > 20
        assert (first.trace, first.events, first.seconds) == (
            again.trace,
            again.events,
            again.seconds,
        )
