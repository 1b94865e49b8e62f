"""Where the time of steps went on one stage, in sums; and what of their way the device waited."""

from __future__ import annotations

import pytest

from bloombee.core import PeerId, Span
from bloombee.protocol.messages import TraceReport
from bloombee.server.exposure import MOST_PASSES, Exposure
from bloombee.server.traces import Moved, Times, Traces

OWNER, OTHER, BEFORE = PeerId("owner"), PeerId("other"), PeerId("before")
SPAN = Span(3, 7)
ONE, TWO = b"1" * 16, b"1" * 8 + b"2" * 8


def times() -> Times:
    return Times(
        BEFORE,
        1000,
        wire_us=300,
        is_timed=True,
        decode_us=20,
        ready_us=1400,
        compute_us=250,
        copy_us=30,
        exposed_us=200,
        encode_us=40,
        handed_us=1500,
    )


def traces(**changes: int) -> Traces:
    made = Traces(**changes)
    made.open(ONE, OWNER, SPAN, 0)
    made.open(TWO, OWNER, SPAN, 0)
    return made


def test_the_parts_of_a_step_are_its_whole() -> None:
    timing = times().timing(PeerId("me"))
    parts = timing.decode_us + timing.queue_us + timing.compute_us + timing.copy_us
    assert parts + timing.encode_us + timing.send_us == timing.total_us == 500
    assert (timing.queue_us, timing.send_us, timing.wire_us) == (100, 60, 300)


def test_sums_are_by_session_and_phase() -> None:
    made = traces()
    moved = Moved(rows=8, bytes_in=800, bytes_out=500, raw_bytes_out=700)
    for phase in ("prefill", "decode", "decode"):
        made.note(ONE, phase, times(), moved, 1570)
    prefill, decode = made.reports(OWNER, ONE, 2000)
    assert (prefill.phase, prefill.steps, decode.phase) == ("prefill", 1, "decode")
    assert decode == TraceReport(
        session=ONE,
        phase="decode",
        upstream=BEFORE,
        start=3,
        end=7,
        steps=2,
        rows=16,
        wire_us=600,
        decode_us=40,
        queue_us=200,
        compute_us=500,
        copy_us=60,
        encode_us=80,
        send_us=260,
        span_us=1140,
        bytes_in=1600,
        bytes_out=1000,
        raw_bytes_out=1400,
        taking_us=140,
        exposed_us=400,
        timed_steps=2,
    )
    parts = decode.decode_us + decode.queue_us + decode.compute_us + decode.copy_us
    assert parts + decode.encode_us + decode.send_us == decode.span_us


@pytest.mark.parametrize(
    ("asker", "prefix", "told"),
    [
        (OWNER, b"", {ONE, TWO}),
        (OWNER, b"1" * 9, {ONE}),
        (OWNER, b"3", set[bytes]()),
        (OTHER, b"", set[bytes]()),
        (OTHER, TWO[:15], set[bytes]()),
        (OTHER, TWO, {TWO}),
    ],
)
def test_sessions_of_others_take_their_whole_id(
    asker: PeerId, prefix: bytes, told: set[bytes]
) -> None:
    made = traces()
    for session in (ONE, TWO):
        made.note(session, "decode", times(), Moved(1, 1, 1, 1), 1500)
    assert {report.session for report in made.reports(asker, prefix, 2000)} == told


def test_the_quietest_sessions_are_forgotten() -> None:
    made = traces(most_sessions=2, kept_us=10_000)
    made.note(ONE, "decode", times(), Moved(1, 1, 1, 1), 1500)
    made.open(b"3" * 16, OTHER, SPAN, 1600)
    assert len(made) == 2
    made.note(TWO, "decode", times(), Moved(1, 1, 1, 1), 1700)  # forgotten: of no use any more
    assert [report.session for report in made.reports(OWNER, b"", 1800)] == [ONE]
    assert made.reports(OWNER, b"", 11_501) == ()


def test_another_epoch_goes_on_and_another_owner_begins_anew() -> None:
    made = traces()
    made.note(ONE, "decode", times(), Moved(1, 1, 1, 1), 1500)
    made.open(ONE, OWNER, SPAN, 1600)
    assert [report.steps for report in made.reports(OWNER, ONE, 1700)] == [1]
    made.open(ONE, OTHER, SPAN, 1600)
    assert made.reports(OTHER, ONE, 1700) == ()


@pytest.mark.parametrize(
    ("passes", "arrived", "wire", "exposed"),
    [
        ([], 1000, 300, 300),
        ([], 1000, 0, 0),
        ([(0, 1100)], 1000, 300, 0),
        ([(0, 800)], 1000, 300, 200),
        ([(750, 800), (900, 1200)], 1000, 300, 150),
        ([(100, 200)], 1000, 300, 300),
    ],
)
def test_what_of_the_way_the_device_waited(
    passes: list[tuple[int, int]], arrived: int, wire: int, exposed: int
) -> None:
    exposure = Exposure()
    for each in passes:
        exposure.computed(*each)
    assert exposure.of(arrived, wire) == exposed


def test_steps_that_were_on_their_way_together_count_once() -> None:
    exposure = Exposure()
    assert [exposure.of(1000, 300), exposure.of(1200, 400), exposure.of(1200, 400)] == [300, 200, 0]


def test_before_the_passes_that_are_known_nothing_counts() -> None:
    exposure = Exposure()
    for number in range(MOST_PASSES + 1):
        exposure.computed(1000 + number * 10, 1005 + number * 10)
    assert exposure.of(1005 + MOST_PASSES * 10, 1 << 40) == (MOST_PASSES - 1) * 5
