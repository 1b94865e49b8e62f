"""What `bloombee-status --trace` makes of what servers say."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from bloombee.cli.status_traces import Told, told_by, traces_of, traces_shown
from bloombee.cli.trace_figure import draw_traces
from bloombee.core import PeerId
from bloombee.errors import TransportError
from bloombee.protocol.messages import TraceReport

if TYPE_CHECKING:
    from pathlib import Path

ME, FIRST, SECOND = "client", "first-stage", "second-stage"


def report(**changes: Any) -> TraceReport:
    figures: dict[str, Any] = {
        "session": b"s" * 16,
        "phase": "decode",
        "upstream": ME,
        "start": 0,
        "end": 2,
        "steps": 10,
        "rows": 80,
        "wire_us": 5_000.0,
        "decode_us": 1_000.0,
        "queue_us": 2_000.0,
        "compute_us": 30_000.0,
        "copy_us": 500.0,
        "encode_us": 1_500.0,
        "send_us": 4_000.0,
        "span_us": 39_000.0,
        "bytes_in": 320,
        "bytes_out": 60_000,
        "raw_bytes_out": 90_000,
        "taking_us": 3_000.0,
        "exposed_us": 4_000.0,
        "timed_steps": 10,
    }
    return TraceReport(**{**figures, **changes})


def two(**changes: Any) -> list[Told]:
    second = report(start=2, end=4, upstream=FIRST, wire_us=61_000.0, exposed_us=50_000.0)
    return [Told(SECOND, second), Told(FIRST, report(**changes))]


def test_the_stages_of_a_step_in_order() -> None:
    (trace,) = traces_of(two())
    first, second = trace.stages
    assert (trace.phase, trace.steps, first.blocks, second.blocks) == ("decode", 10, "0:2", "2:4")
    assert first.parts_ms == pytest.approx((0.5, 0.1, 0.2, 0.05, 3.0, 0.15, 0.1))
    assert second.parts_ms == pytest.approx((6.1, 0.1, 0.2, 0.05, 3.0, 0.15, 0.4))  # to the client
    assert trace.step_ms == pytest.approx(4.1 + 10.0)
    assert second.share == pytest.approx(10.0 / 14.1)
    assert (trace.exposed_ms, trace.exposed_share) == pytest.approx((5.4, 5.4 / 14.1))
    assert (first.rows, first.bytes_out, first.raw_bytes_out) == (8, 6_000, 9_000)


def test_round_a_loop_handing_over_is_part_of_the_next_wire() -> None:
    (trace,) = traces_of(two(upstream=SECOND))
    assert [row.parts_ms[-1] for row in trace.stages] == pytest.approx([0.1, 0.1])


def test_sessions_of_one_call_are_one_and_phases_are_apart() -> None:
    other = report(session=b"t" * 16, steps=30, timed_steps=20, wire_us=1_000.0, compute_us=0.0)
    prefill = report(phase="prefill", steps=1, timed_steps=0, wire_us=0.0)
    first, second = traces_of([*two(), Told(FIRST, other), Told(FIRST, prefill)])
    assert (first.phase, first.stages[0].timed_steps, second.phase) == ("prefill", 0, "decode")
    row = second.stages[0]
    assert (row.steps, row.compute_ms) == (40, pytest.approx(30.0 / 40))
    assert row.wire_ms == pytest.approx(6.0 / 30)  # of the steps whose way is known


def test_servers_that_are_not_heard_or_know_nothing_are_left_out() -> None:
    lost = {PeerId(FIRST): TransportError("gone")}
    assert told_by([lost]) == []
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(traces_shown(()))
    assert "no server knows such a session" in console.export_text()


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    traces = traces_of(two())
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(traces_shown(traces))
    text = console.export_text()
    assert "decode: 10 steps a stage" in text
    assert "5.40 ms, 38 % of the step" in text
    assert "6.0 (9.0)" in text
    file = tmp_path / "traces.png"
    draw_traces({trace.phase: trace for trace in traces}, file)
    assert file.read_bytes().startswith(b"\x89PNG")
