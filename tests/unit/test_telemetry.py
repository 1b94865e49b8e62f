"""Counters, timers, the stopwatch, log lines and the progress bar."""

from __future__ import annotations

import logging
import time
import warnings
from typing import TYPE_CHECKING

import pytest

from bloombee.telemetry import Progress, Registry, Stopwatch, configure_logging, now_s, now_us

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Puts the root logger back as it was."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    logging.captureWarnings(capture=False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def _busy(duration_s: float) -> None:
    until = time.perf_counter() + duration_s
    while time.perf_counter() < until:
        pass


def test_the_clocks_run_together() -> None:
    start_s, start_us = now_s(), now_us()
    _busy(0.01)
    assert now_us() - start_us == pytest.approx((now_s() - start_s) * 1e6, rel=0.2)
    assert now_us() - start_us >= 10_000


def test_a_stopwatch_measures_and_laps() -> None:
    watch = Stopwatch()
    _busy(0.01)
    assert watch.elapsed_s >= 0.01
    first_us = watch.lap_us()
    assert first_us >= 10_000
    assert watch.elapsed_us < first_us


def test_counters_and_timers_add_up() -> None:
    registry = Registry()
    registry.counter("bytes").add(3)
    registry.counter("bytes").add()
    registry.timer("encode").record(5)
    registry.timer("encode").record(2)
    assert registry.snapshot() == {
        "bytes": 4,
        "encode_count": 2,
        "encode_us": 7,
        "encode_max_us": 5,
    }
    assert registry.timer("encode").last_us == 2


def test_a_span_counts_also_when_its_body_raises() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="broken"), registry.span("compute"):
        _busy(0.002)
        raise ValueError("broken")
    assert registry.timer("compute").count == 1
    assert registry.timer("compute").total_us >= 2_000


@pytest.mark.usefixtures("restored_logging")
def test_logs_are_plain_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    logging.getLogger("bloombee.server").info("serving %s", "0:10")
    logging.getLogger("bloombee.server").debug("too detailed")
    logging.getLogger("hivemind").info("chatter")
    line = capsys.readouterr().err
    assert line.endswith(" INFO bloombee.server: serving 0:10\n")
    assert line.count("\n") == 1


@pytest.mark.usefixtures("restored_logging")
def test_configuring_twice_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error")
    configure_logging("debug")
    logging.getLogger("bloombee").debug("once")
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.usefixtures("restored_logging")
def test_warnings_go_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old call", FutureWarning, stacklevel=1)
    assert "py.warnings" in capsys.readouterr().err


def test_progress_draws_nothing_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("loading", 10, unit="items") as bar:
        bar.advance()
        bar.advance(9)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
