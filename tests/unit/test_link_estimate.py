"""What answers to beats tell of a link, against a simulated one; and which codec follows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.planner.link_control import (
    BEGIN,
    RAW,
    SPLIT,
    CodecFigures,
    CodecRecord,
    LinkControl,
    Transfer,
    wanted,
)
from bloombee.planner.neighbours import AUTO, Neighbours, Rows
from bloombee.protocol.link_estimate import EXPIRES_US, MOST_MARKS, LinkEstimator
from bloombee.protocol.report_messages import MOST_LINKS

OFFSET_US = 987_654_321
BEAT_US = 500_000


@dataclass
class FakeLink:
    """A queue with a rate and a delay, over which steps and beats go; all in microseconds."""

    mbps: float
    delay_us: int = 10_000
    back_us: int | None = None
    noise_us: int = 0
    estimator: LinkEstimator = field(default_factory=LinkEstimator)
    now_us: int = 1_000_000
    free_us: float = 0.0
    beaten_us: int = 0
    beats: int = 0
    luck: random.Random = field(default_factory=lambda: random.Random(4))
    answers: list[tuple[float, int, int]] = field(default_factory=list)

    def beat(self, late_us: int = 0) -> None:
        sent_us = self.estimator.mark(self.now_us)
        arrives = max(self.free_us, self.now_us) + self.delay_us
        heard = arrives + self.luck.uniform(0, self.noise_us) + late_us
        back_us = self.delay_us if self.back_us is None else self.back_us
        self.answers.append((heard + back_us, sent_us, int(heard + OFFSET_US)))
        self.beaten_us = self.now_us
        self.beats += 1

    def step(self, size: int, every_us: int, late_us: int = 0) -> None:
        self._hear()
        if self.now_us - self.beaten_us >= BEAT_US:
            self.beat()
        is_due = self.estimator.is_due(self.now_us, size)
        self.estimator.sending(self.now_us, size)
        self.free_us = max(self.free_us, self.now_us) + size * 8 / self.mbps
        if is_due:
            self.beat(late_us)
        self.now_us += every_us

    def run(self, seconds: float, size: int, every_us: int) -> None:
        for _ in range(int(seconds * 1e6 / every_us)):
            self.step(size, every_us)
        self._hear()

    def _hear(self) -> None:
        for answer in [each for each in self.answers if each[0] <= self.now_us]:
            self.answers.remove(answer)
            self.estimator.heard(answer[1], answer[2], int(answer[0]))

    @property
    def measured_mbps(self) -> float:
        return self.estimator.bytes_per_s(self.now_us) * 8 / 1e6


@pytest.mark.parametrize("delay_us", [50, 10_000, 40_000])
@pytest.mark.parametrize(
    ("mbps", "size", "every_us"),
    [(20, 37_000, 60_000), (125, 37_000, 20_000), (500, 295_000, 50_000), (20, 9_200, 3_700)],
)
def test_rate_round_trip_and_offset(delay_us: int, mbps: float, size: int, every_us: int) -> None:
    link = FakeLink(mbps, delay_us, noise_us=200)
    link.run(3.0, size, every_us)
    assert link.measured_mbps == pytest.approx(mbps, rel=0.15)
    assert link.estimator.rtt_s == pytest.approx(2 * delay_us / 1e6, abs=1e-3)
    assert link.estimator.offset_s == pytest.approx(OFFSET_US / 1e6, abs=1e-3)


def test_a_way_back_that_is_busy_spoils_nothing() -> None:
    link = FakeLink(20, 10_000, back_us=150_000)
    link.run(3.0, 37_000, 60_000)
    assert link.measured_mbps == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize("late_us", [500_000, -9_000])
@given(st.integers(12, 40))
@settings(max_examples=20, deadline=None)
def test_one_outlier_moves_nothing(late_us: int, at: int) -> None:
    rates: list[float] = []
    for spoilt in (False, True):
        link = FakeLink(20, noise_us=100)
        for number in range(60):
            link.step(37_000, 60_000, late_us if spoilt and number == at else 0)
        rates.append(link.measured_mbps)
        assert link.estimator.rtt_s == pytest.approx(0.02, abs=1e-3)
    assert rates[1] == pytest.approx(rates[0], rel=0.05)


def test_a_drop_shows_within_two_seconds_and_so_does_the_return() -> None:
    link = FakeLink(20)
    link.run(2.0, 37_000, 60_000)
    link.mbps = 0.8
    link.run(2.0, 37_000, 400_000)
    assert link.measured_mbps < 1.0
    link.mbps = 20
    link.now_us = max(link.now_us, int(link.free_us))
    link.run(2.0, 25_000, 60_000)  # coded payloads measure as well
    assert link.measured_mbps == pytest.approx(20, rel=0.1)


def test_what_is_under_way_for_too_long_bounds_the_rate() -> None:
    link = FakeLink(20)
    link.run(2.0, 37_000, 60_000)
    link.mbps = 0.01
    link.step(37_000, 0)
    link.now_us += 3_000_000
    assert link.measured_mbps < 0.2


def test_fast_links_are_seldom_marked_and_small_frames_never() -> None:
    link = FakeLink(10_000)
    link.run(2.0, 37_000, 10_000)
    assert 10 < link.beats < 40  # of 200 steps
    assert not link.estimator.is_due(link.now_us + 10**9, 1000)


def test_it_forgets_and_is_bounded() -> None:
    link = FakeLink(20)
    link.run(2.0, 37_000, 60_000)
    assert link.estimator.bytes_per_s(link.now_us + EXPIRES_US + 10**6) == 0
    idle = LinkEstimator()
    for number in range(3 * MOST_MARKS):
        idle.mark(number)
    assert not idle.is_due(10**6, 37_000)
    idle.heard(12345, 1, 2)  # never asked
    assert idle.rtt_s == 0


def test_a_stream_that_ends_leaves_no_wrong_rate() -> None:
    link = FakeLink(20)
    link.run(2.0, 37_000, 60_000)
    lost = link.estimator.mark(link.now_us)
    link.estimator.lose(lost)
    link.run(2.0, 37_000, 60_000)
    assert link.measured_mbps == pytest.approx(20, rel=0.1)


# Choice -------------------------------------------------------------------------------

_TRANSFERS = st.builds(
    Transfer,
    raw_bytes=st.integers(4096, 10**7),
    bytes_per_s=st.floats(1e4, 1e10),
    rtt_s=st.floats(0, 0.5),
    compute_s=st.floats(0, 1),
    figures=st.builds(
        CodecFigures, st.floats(0.3, 1.1), st.floats(1e-10, 1e-7), st.floats(1e-10, 1e-7)
    ),
)


@given(_TRANSFERS, st.sampled_from([RAW, SPLIT]))
def test_no_codec_costs_more_than_it_saves(transfer: Transfer, current: str) -> None:
    if wanted(current, transfer) == SPLIT:
        cost_s = transfer.figures.cost_s(transfer.raw_bytes)
        assert transfer.saved_s > cost_s
        assert transfer.saved_s - cost_s >= 0.01 * transfer.compute_s - 1e-12
    else:
        assert transfer.saved_s < BEGIN * transfer.needed_s


@given(_TRANSFERS, st.lists(st.floats(0.8, 1.2), min_size=40, max_size=40))
def test_noise_does_not_make_it_flap(transfer: Transfer, noise: list[float]) -> None:
    control, changes = LinkControl(), 0
    for number, factor in enumerate(noise):
        seen = Transfer(
            raw_bytes=transfer.raw_bytes,
            bytes_per_s=transfer.bytes_per_s * factor,
            rtt_s=transfer.rtt_s,
            compute_s=transfer.compute_s,
            figures=transfer.figures,
        )
        changes += control.choose("decode", seen, float(number)).is_new
    assert changes <= 1


def _choose(neighbours: Neighbours, phase: str = "decode", raw_bytes: int = 37_000) -> str:
    rows = Rows(phase=phase, raw_bytes=raw_bytes, dtype="bfloat16", compute_s=0.02)
    return neighbours.choose("peer", rows, _choose_us()).codec


def _choose_us() -> int:
    return 3_000_000


def test_links_that_are_not_measured_get_raw_rows_and_pins_hold() -> None:
    assert _choose(Neighbours(AUTO)) == RAW
    assert _choose(Neighbours(SPLIT), raw_bytes=10) == SPLIT
    assert _choose(Neighbours(RAW)) == RAW


def test_lossy_codecs_are_never_chosen() -> None:
    neighbours = Neighbours(AUTO)
    link = FakeLink(1.0, estimator=neighbours.estimator("peer"))
    link.run(3.0, 37_000, 400_000)
    chosen = {_choose(neighbours) for _ in range(10)}
    assert chosen == {RAW, SPLIT}
    found = neighbours.reports(link.now_us)[0]
    assert (found.peer, found.codec) == ("peer", SPLIT)
    assert "Mbit/s: coding saves" in found.reason


def test_rows_that_do_not_shrink_stay_raw_until_it_is_tried_again() -> None:
    record = CodecRecord()
    for number in range(30):
        record.encoded("bfloat16", 37_000, 37_100, 1e-4, float(number))
    assert record.figures("bfloat16", 30.0).ratio > 0.99
    assert record.figures("bfloat16", 120.0).ratio == pytest.approx(0.68)


def test_peers_are_bounded() -> None:
    neighbours = Neighbours(AUTO)
    for number in range(MOST_LINKS + 10):
        neighbours.estimator(f"peer {number}")
    assert len(neighbours) == MOST_LINKS
