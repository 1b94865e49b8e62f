"""Whole swarms under seeded faults: the answers are those of an undisturbed swarm, nothing leaks.

Each seed is a swarm, its clients' scripts, and a schedule of faults, run in virtual
time. A seed that fails is run alone, with its schedule and the full log, by

    pytest tests/swarm/test_chaos.py --fault-seed N
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jaxtyping

from bloombee.protocol.messages import PREFIX_TOKENS
from bloombee.telemetry import now_s
from tests.swarm.chaos.drive import make_case, run_case

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from tests.swarm.chaos.drive import Case, Report

SEEDS = 360
UNDISTURBED = 40
CHECKED = 10
"""In every so manieth run shapes are checked, which takes twice as long as all the rest."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All seeds, or the one asked for."""
    if "fault_seed" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--fault-seed")
        metafunc.parametrize("fault_seed", range(SEEDS) if wanted is None else [wanted])


def test_no_fault_changes_an_answer_or_leaks_a_page(
    fault_seed: int, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    with shapes_checked(False):
        case = make_case(fault_seed)
    if request.config.getoption("--fault-seed") is None:
        with shapes_checked(fault_seed % CHECKED == 0):
            report = run_case(case)
    else:
        with capsys.disabled():
            sys.stdout.write(f"\n{case}\n")
            report = run_logged(case)
            sys.stdout.write(f"{report}\n")
    told = f"reproduce with: pytest tests/swarm/test_chaos.py --fault-seed {fault_seed}"
    assert not report.problems, f"{report}\n{told}"


def test_without_faults_every_client_gets_the_right_answers() -> None:
    adopted = 0
    for seed in range(UNDISTURBED):
        report = run_case(make_case(seed, disturbed=False))
        assert not report.problems, report
        assert not report.errors, report
        adopted += report.adopted
    assert adopted > 5 * PREFIX_TOKENS


def test_the_same_seed_gives_the_same_events_in_the_same_order() -> None:
    for seed in range(20):
        with shapes_checked(False):
            first, again = (run_case(make_case(seed)) for _ in range(2))
        assert first.case == again.case
        assert first.events > 20
        assert first.struck == again.struck
        assert (first.trace, first.events, first.seconds) == (
            again.trace,
            again.events,
            again.seconds,
        )


@contextmanager
def shapes_checked(wanted: bool) -> Iterator[None]:
    """Leave the checks of tensor shapes out inside, unless they are `wanted`."""
    jaxtyping.config.update("jaxtyping_disable", not wanted)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


class _VirtualTime(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{now_s():9.4f} {super().format(record)}"


def run_logged(case: Case) -> Report:
    """Run a case with everything it logs on the terminal."""
    logger = logging.getLogger("bloombee")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_VirtualTime("%(levelname).1s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        return run_case(case)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
