"""The handshake's pure part, and errors as messages."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.core import PeerId, SessionId
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    KVFull,
    ProtocolError,
    StepFailed,
    VersionMismatch,
)
from bloombee.protocol import failures, handshake
from bloombee.protocol.handshake import MAX_SKEW_S, Greeting
from bloombee.protocol.messages import Challenge, Failed, Hello

ME, KEY, NOW = PeerId("dialer"), b"public", 5000.0
CHALLENGE = Challenge((1,), "listener", b"n" * 16, NOW)
GREETING = Greeting(CHALLENGE, b"certificate hash", None)


def sign(data: bytes) -> bytes:
    return hashlib.sha256(b"secret" + data).digest()


def verify(peer: PeerId, key: bytes, data: bytes, signature: bytes) -> bool:
    return (peer, key) == (ME, KEY) and signature == sign(data)


def hello(greeting: Greeting = GREETING, now: float = NOW) -> Hello:
    return handshake.answer(greeting, ME, KEY, sign, now)


def test_an_honest_hello_proves_the_peer() -> None:
    assert handshake.check(GREETING, hello(), verify, NOW) == ME
    private = dataclasses.replace(GREETING, swarm_key=b"k")
    assert handshake.check(private, hello(private), verify, NOW) == ME


@pytest.mark.parametrize(
    "elsewhere",
    [
        dataclasses.replace(GREETING, certificate_hash=b"another certificate"),
        dataclasses.replace(
            GREETING, challenge=msgspec.structs.replace(CHALLENGE, nonce=b"m" * 16)
        ),
        dataclasses.replace(GREETING, challenge=msgspec.structs.replace(CHALLENGE, peer="relay")),
        dataclasses.replace(
            GREETING, challenge=msgspec.structs.replace(CHALLENGE, versions=(1, 2))
        ),
    ],
)
def test_a_hello_is_worth_nothing_elsewhere(elsewhere: Greeting) -> None:
    with pytest.raises(AuthError, match="does not fit this connection"):
        handshake.check(GREETING, hello(elsewhere), verify, NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "victim"},
        {"peer": ""},
        {"public_key": b"other"},
        {"signature": b""},
        {"signature": bytes(32)},
        {"time_s": NOW + 1.0},
    ],
)
def test_a_changed_hello_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(AuthError):
        handshake.check(GREETING, msgspec.structs.replace(hello(), **change), verify, NOW)


def test_swarm_keys() -> None:
    private = dataclasses.replace(GREETING, swarm_key=b"key")
    other = dataclasses.replace(GREETING, swarm_key=b"wrong")
    cases = ((private, GREETING, "private"), (private, other, "wrong"), (GREETING, other, "public"))
    for ours, theirs, says in cases:
        with pytest.raises(AuthError, match=says):
            handshake.check(ours, hello(theirs), verify, NOW)


@pytest.mark.parametrize("skew_s", [-MAX_SKEW_S, -30.0, 30.0, MAX_SKEW_S])
def test_clocks_may_differ_a_little(skew_s: float) -> None:
    assert handshake.check(GREETING, hello(now=NOW + skew_s), verify, NOW) == ME


def test_clocks_too_far_apart_are_named_on_both_sides() -> None:
    with pytest.raises(AuthError, match=r"server's clock is 150 s behind ours \(limit 120 s\)"):
        hello(now=NOW + 150.0)
    with pytest.raises(AuthError, match="client's clock is 200 s ahead of ours"):
        handshake.check(GREETING, hello(now=NOW + 50.0), verify, NOW - 150.0)


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf")])
def test_times_that_are_none(time_s: float) -> None:
    with pytest.raises(ProtocolError, match="as its time"):
        handshake.check(GREETING, msgspec.structs.replace(hello(), time_s=time_s), verify, NOW)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_negotiation_takes_the_best_common_version(offered: list[int]) -> None:
    if 1 in offered:
        assert handshake.negotiate(offered) == 1
    else:
        with pytest.raises(VersionMismatch, match="we speak 1"):
            handshake.negotiate(offered)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_a_version_that_was_not_offered_is_refused(version: int) -> None:
    with pytest.raises(VersionMismatch, match=str(version)):
        handshake.check(GREETING, msgspec.structs.replace(hello(), version=version), verify, NOW)


def test_signed_bytes_differ_when_any_field_moves_into_the_next() -> None:
    left = Greeting(msgspec.structs.replace(CHALLENGE, peer="ab"), b"x", None)
    right = Greeting(msgspec.structs.replace(CHALLENGE, peer="b"), b"xa", None)
    assert left.signed_bytes(ME, 1, NOW) != right.signed_bytes(ME, 1, NOW)
    assert left.signed_bytes(PeerId("c"), 1, NOW) != left.signed_bytes(ME, 1, NOW)


def test_errors_travel_by_code() -> None:
    session = SessionId(b"s" * 16)
    failed = failures.to_message(KVFull("3 free"), session=session, epoch=2, step=7)
    assert failed == Failed(session, 2, 7, "kv-full", "3 free")
    assert isinstance(failures.to_error(failed), KVFull)
    assert not failures.is_about_stream(failed)
    assert failures.is_about_stream(failures.to_message(KVFull("")))
    foreign = failures.to_error(failures.to_message(ZeroDivisionError("x" * 9000)))
    assert type(foreign) is StepFailed
    assert len(str(foreign)) <= 4096
    unknown = failures.to_error(Failed(session, 0, 0, "from-the-future", "hm"))
    assert type(unknown) is BloomBeeError


def test_what_a_peer_says_cannot_break_a_line_or_flood_a_log() -> None:
    failed = Failed(bytes(16), 0, 0, "auth", "one\nERROR two\x1b[2J" + "x" * 4000)
    text = str(failures.to_error(failed))
    assert text.startswith("one ERROR two [2J")
    assert text.isprintable()
    assert len(text) <= 2000
