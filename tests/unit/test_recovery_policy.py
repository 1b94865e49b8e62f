"""What a client does about stages in trouble, whom it leaves out, and who sits on a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.core import PeerId
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    DeadlineExceeded,
    HopLost,
    KVFull,
    ModelError,
    PeerStopping,
    ProtocolError,
    RequestError,
    StaleEpoch,
    StepFailed,
    TransportError,
    Unsupported,
)
from bloombee.planner.recovery import (
    FAILURES_OF_A_STEP,
    Care,
    Cares,
    Casebook,
    PeerHealth,
    StallWatch,
    Symptom,
    Treatment,
    Trouble,
    trouble_of,
)

PEERS = [PeerId(name) for name in "abcd"]
STAY: Cares = (Care.KEEP, Care.REPLACE)


def book() -> Casebook:
    return Casebook(first_pause_s=0.1, longest_pause_s=1.0)


def treat(casebook: Casebook, *symptoms: tuple[int, Trouble]) -> Treatment:
    return casebook.treat([Symptom(*each) for each in symptoms], PEERS)


def first(treatment: Treatment) -> str:
    """The first care of each stage, as letters."""
    return "".join(cares[0].value[0] for cares in treatment.cares)


@pytest.mark.parametrize(
    ("error", "reported", "met"),
    [
        (TransportError("x"), Trouble.CONFUSED, Trouble.BROKEN),
        (DeadlineExceeded("x"), Trouble.CONFUSED, Trouble.BROKEN),
        (HopLost("x"), Trouble.HOP, Trouble.HOP),
        (ProtocolError("x"), Trouble.CONFUSED, Trouble.CONFUSED),
        (StaleEpoch("x"), Trouble.CONFUSED, Trouble.CONFUSED),
        (StepFailed("x"), Trouble.FAILED, Trouble.FAILED),
        (PeerStopping("x"), Trouble.STOPPING, Trouble.STOPPING),
        (KVFull("x"), Trouble.UNFIT, Trouble.UNFIT),
        (RequestError("x"), Trouble.REQUEST, Trouble.UNFIT),
        (Unsupported("x"), Trouble.REQUEST, Trouble.UNFIT),
        (ModelError("x"), Trouble.REQUEST, Trouble.UNFIT),
        (AuthError("x"), Trouble.REQUEST, Trouble.UNFIT),
        (BloomBeeError("x"), Trouble.CONFUSED, Trouble.CONFUSED),
    ],
)
def test_what_errors_mean(error: BloomBeeError, reported: Trouble, met: Trouble) -> None:
    assert trouble_of(error, reported=True) is reported
    assert trouble_of(error, reported=False) is met


@pytest.mark.parametrize(
    ("symptoms", "cares"),
    [
        ([(1, Trouble.BROKEN)], "kkkk"),
        ([(1, Trouble.SILENT)], "krkk"),
        ([(1, Trouble.HOP)], "kkkk"),
        ([(1, Trouble.CONFUSED)], "kkkk"),
        ([(1, Trouble.STALLED)], "kkkk"),
        ([(1, Trouble.FAILED)], "krkk"),
        ([(1, Trouble.GAP)], "kekk"),
        ([(1, Trouble.STOPPING)], "krkk"),
        ([(1, Trouble.UNFIT)], "krkk"),
        ([(1, Trouble.SILENT), (2, Trouble.FAILED)], "krrk"),
        ([(0, Trouble.CONFUSED), (0, Trouble.SILENT)], "rkkk"),
        ([(stage, Trouble.SILENT) for stage in range(4)], "kkkk"),
        ([(stage, Trouble.SILENT) for stage in range(3)], "rrrk"),
        ([], "kkkk"),
    ],
)
def test_the_mildest_care_comes_first(symptoms: list[tuple[int, Trouble]], cares: str) -> None:
    assert first(treat(book(), *symptoms)) == cares


@pytest.mark.parametrize(
    ("trouble", "cares"),
    [
        (Trouble.BROKEN, ["kkkk", "kkkk", "krkk", "krkk"]),
        (Trouble.HOP, ["kkkk", "kkrk", "krkk", "kkrk", "krkk"]),
        (Trouble.CONFUSED, ["kkkk", "krkk", "krkk"]),
        (Trouble.STALLED, ["kkkk", "krkk", "krkk"]),
        (Trouble.GAP, ["kekk", "krkk"]),
    ],
)
def test_trouble_that_comes_again_gets_a_stronger_care(trouble: Trouble, cares: list[str]) -> None:
    casebook = book()
    assert [first(treat(casebook, (1, trouble))) for _ in cares] == cares
    casebook.progress()
    assert first(treat(casebook, (1, trouble))) == cares[0]


def test_the_far_end_of_the_last_hop_is_the_first_stage() -> None:
    casebook = book()
    found = [first(treat(casebook, (3, Trouble.HOP))) for _ in range(4)]
    assert found == ["kkkk", "rkkk", "kkkr", "rkkk"]
    assert first(treat(book(), (3, Trouble.HOP), (0, Trouble.SILENT))) == "rkkk"


def test_a_hop_is_not_to_blame_for_its_far_end() -> None:
    casebook = book()
    for _ in range(3):
        found = treat(casebook, (0, Trouble.HOP), (1, Trouble.SILENT))
        assert first(found) == "krkk"


def test_every_care_has_another_to_fall_back_on() -> None:
    for trouble in set(Trouble) - {Trouble.REQUEST}:
        casebook = book()
        for _ in range(5):
            for cares in treat(casebook, (1, trouble)).cares:
                assert Care.REPLACE in cares
                assert len(set(cares)) == 2


def test_the_caller_learns_of_its_own_faults_at_once() -> None:
    assert treat(book(), (2, Trouble.REQUEST)).hopeless == Symptom(2, Trouble.REQUEST)


def test_a_step_that_fails_everywhere_is_given_up() -> None:
    casebook = book()
    found = [
        treat(casebook, (stage, Trouble.FAILED)).hopeless for stage in range(FAILURES_OF_A_STEP)
    ]
    assert found[:-1] == [None] * (FAILURES_OF_A_STEP - 1)
    assert found[-1] is not None
    casebook.progress()
    assert treat(casebook, (0, Trouble.FAILED)).hopeless is None


def test_pauses_grow_to_a_cap_and_start_anew() -> None:
    casebook = book()
    pauses = [treat(casebook).pause_s for _ in range(9)]
    assert pauses == pytest.approx([0, 0, 0.1, 0.2, 0.4, 0.8, 1, 1, 1])
    casebook.progress()
    assert treat(casebook).pause_s == 0


def test_a_peer_is_left_out_longer_each_time_and_never_for_ever() -> None:
    health = PeerHealth(backoff_s=0.5, cap_s=30)
    now_s, waits = 0.0, []
    for _ in range(9):
        health.failed(PEERS[0], now_s)
        begun_s = now_s
        while PEERS[0] in health.left_out(now_s):
            now_s += 0.5
        waits.append(now_s - begun_s)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    health.failed(PEERS[0], now_s)
    health.worked(PEERS[0])
    assert not health.left_out(now_s)
    health.failed(PEERS[0], now_s)
    assert not health.left_out(now_s + 0.5)


def test_who_leaves_is_left_out_and_has_not_failed() -> None:
    health = PeerHealth(backoff_s=0.5, cap_s=30)
    health.leaves(PEERS[0], 0)
    assert health.left_out(29) == {PEERS[0]}
    assert not health.left_out(30)
    health.failed(PEERS[0], 30)
    assert not health.left_out(30.5)


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.floats(0, 100)), max_size=40))
def test_nobody_is_left_out_beyond_the_cap(failures: list[tuple[PeerId, float]]) -> None:
    health, last_s = PeerHealth(backoff_s=0.5, cap_s=8), 0.0
    for peer, at_s in sorted(failures, key=lambda each: each[1]):
        health.failed(peer, at_s)
        last_s = at_s
    assert not health.left_out(last_s + 8)


def test_whoever_holds_a_step_too_long_is_suspected() -> None:
    watch = StallWatch(stage_s=10)
    assert watch.suspect(5, [5, 4, 4], 0) is None
    assert watch.suspect(5, [5, 4, 4], 10) is None
    assert watch.suspect(5, [5, 4, 4], 10.5) == 1
    assert watch.suspect(5, [5, 4, 4], 11) is None, "it is told once, then the time starts anew"
    assert watch.suspect(5, [5, 5, 4], 12) is None
    assert watch.suspect(5, [5, 5, 4], 21) is None
    assert watch.suspect(5, [5, 5, 4], 23) == 2


def test_time_counts_from_when_the_step_came() -> None:
    watch = StallWatch(stage_s=10)
    for second in range(100):
        assert watch.suspect(second, [second, second - 1], float(second)) is None
    assert watch.suspect(0, [99, 98], 150) is None, "nothing is due"
    assert watch.suspect(100, [100, 99], 151) is None


def test_an_answer_that_nobody_sends_is_the_last_stages() -> None:
    watch = StallWatch(stage_s=1)
    assert watch.suspect(5, [9, 9, 9], 0) is None
    assert watch.suspect(5, [9, 9, 9], 2) == 2
