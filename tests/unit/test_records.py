"""What peers say in the DHT is small, signed, bounded, and dropped when it isn't."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hivemind.dht.crypto import DHTRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import PeerId, Span
from bloombee.swarm import records
from bloombee.swarm.dht import OwnedValues
from bloombee.swarm.envelope import Envelope, seal, unseal
from bloombee.swarm.identity import Identity, peer_id_bytes
from bloombee.swarm.keys import model_keys, span_keys
from bloombee.swarm.records import (
    ServerRecord,
    ServerState,
    decode_model,
    decode_server,
    encode_model,
    encode_server,
    encode_tombstone,
)

NOW_S = 1_800_000_000.0
EXPIRES_S = NOW_S + 30
ME = Identity.load_or_create(None)
OTHER = Identity.load_or_create(None)


def owner(identity: Identity = ME) -> bytes:
    raw = peer_id_bytes(identity.peer_id)
    assert raw is not None
    return raw


def a_record(**changes: Any) -> ServerRecord:
    record = ServerRecord(
        peer=ME.peer_id,
        fingerprint="0123456789abcdef" * 4,
        model="meta-llama/Llama-3.3-70B-Instruct",
        num_blocks=80,
        span=Span(37, 55),
        addresses=("[2001:db8:1234:5678::9abc]:31338", "203.0.113.250:31338"),
        certificate_hash=bytes(range(32)),
        dtype="bfloat16",
        kv_tokens=1_234_567,
        max_length=131_072,
        throughput_tokens_per_s=1234.5,
        version="0.1.0.dev1234",
        state=ServerState.ONLINE,
        published_at_s=NOW_S,
    )
    return replace(record, **changes)


def test_a_record_survives_the_trip_and_stays_small() -> None:
    for record in (a_record(), a_record(next_span=Span(0, 18), pinned=True, moved_at_s=NOW_S)):
        sealed = encode_server(record, EXPIRES_S, ME)
        assert len(sealed) <= 400
        assert decode_server(owner(), sealed, NOW_S) == record


def test_records_may_have_more_fields_and_fewer() -> None:
    """Of servers that are newer, and older."""
    envelope = unseal(owner(), encode_server(a_record(), EXPIRES_S, ME))
    assert envelope is not None
    fields = msgspec.msgpack.decode(envelope.body)
    for body in ([*fields, "new"], fields[:-4]):
        sealed = seal(msgspec.msgpack.encode(body), EXPIRES_S, ME)
        assert decode_server(owner(), sealed, NOW_S) == a_record()


def test_a_model_announcement_survives_the_trip() -> None:
    sealed = encode_model(a_record(), EXPIRES_S, ME)
    assert len(sealed) <= 250
    announcement = decode_model(owner(), sealed, NOW_S)
    assert announcement is not None
    assert (announcement.peer, announcement.num_blocks) == (ME.peer_id, 80)
    assert announcement.fingerprint == a_record().fingerprint


def test_kinds_are_not_mixed_up() -> None:
    assert decode_model(owner(), encode_server(a_record(), EXPIRES_S, ME), NOW_S) is None
    assert decode_server(owner(), encode_model(a_record(), EXPIRES_S, ME), NOW_S) is None


def test_nobody_speaks_for_another() -> None:
    sealed = encode_server(a_record(), EXPIRES_S, ME)
    assert decode_server(owner(OTHER), sealed, NOW_S) is None
    with pytest.raises(ValueError, match="can't be signed"):
        encode_server(a_record(), EXPIRES_S, OTHER)


def test_a_tombstone_is_nothing() -> None:
    assert decode_server(owner(), encode_tombstone(EXPIRES_S, ME), NOW_S) is None
    assert unseal(owner(), encode_tombstone(EXPIRES_S, ME)) is not None


def test_the_expiry_is_signed() -> None:
    envelope = unseal(owner(), encode_server(a_record(), EXPIRES_S, ME))
    assert envelope is not None
    longer = Envelope(envelope.body, EXPIRES_S + 30, envelope.signature)
    assert decode_server(owner(), msgspec.msgpack.encode(longer), NOW_S) is None


@pytest.mark.parametrize(
    ("published_s", "expires_s", "seen"),
    [
        (NOW_S, NOW_S + 30, True),
        (NOW_S - 29, NOW_S + 1, True),
        (NOW_S - 31, NOW_S - 1, False),
        (NOW_S + 5, NOW_S + 35, True),
        (NOW_S + 100, NOW_S + 130, False),
        (NOW_S, NOW_S + 3600, False),
        (float("nan"), NOW_S + 30, False),
        (NOW_S, float("inf"), False),
        (NOW_S, float("nan"), False),
    ],
)
def test_times_have_bounds(published_s: float, expires_s: float, *, seen: bool) -> None:
    sealed = seal(_body(published_at_s=published_s), expires_s, ME)
    assert (decode_server(owner(), sealed, NOW_S) is not None) is seen


@pytest.mark.parametrize(
    "lie",
    [
        {"start": 55, "end": 37},
        {"start": 37, "end": 37},
        {"end": 81},
        {"num_blocks": 100_000},
        {"start": -1},
        {"fingerprint": ""},
        {"fingerprint": "x" * 97},
        {"model": "red\x1b[31m"},
        {"version": "1\n2"},
        {"addresses": ("203.0.113.5",)},
        {"addresses": ("203.0.113.5:0",)},
        {"addresses": ("203.0.113.5:99999",)},
        {"addresses": ("a b\t:1",)},
        {"addresses": ("h:1",) * 5},
        {"certificate_hash": bytes(33)},
        {"kv_tokens": 1 << 60},
        {"kv_tokens": -1},
        {"throughput_tokens_per_s": -1.0},
        {"throughput_tokens_per_s": float("nan")},
        {"throughput_tokens_per_s": float("inf")},
    ],
    ids=str,
)
def test_lies_are_dropped_with_a_debug_message(
    lie: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert decode_server(owner(), seal(_body(), EXPIRES_S, ME), NOW_S) is not None
    with caplog.at_level(logging.DEBUG, logger="bloombee.swarm.records"):
        assert decode_server(owner(), seal(_body(**lie), EXPIRES_S, ME), NOW_S) is None
    assert any(ME.peer_id in message for message in caplog.messages)


def test_our_own_records_are_checked_before_they_go_out() -> None:
    for changes in ({"addresses": ("no port",)}, {"model": "a\nb"}, {"num_blocks": 50}):
        with pytest.raises((ValueError, msgspec.ValidationError)):
            encode_server(a_record(**changes), EXPIRES_S, ME)


def _body(**changes: Any) -> bytes:
    """A server record's body as msgpack, with any value in any field."""
    fields = {
        "fingerprint": "f" * 64,
        "model": "smollm2",
        "num_blocks": 80,
        "start": 37,
        "end": 55,
        "addresses": ("127.0.0.1:5000",),
        "certificate_hash": bytes(32),
        "dtype": "float32",
        "kv_tokens": 1000,
        "max_length": 8192,
        "throughput_tokens_per_s": 10.0,
        "version": "0.1.0",
        "state": "online",
        "published_at_s": NOW_S,
    }
    return msgspec.msgpack.encode([1, *(fields | changes).values()])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_never_raises(noise: bytes) -> None:
    assert decode_server(owner(), noise, NOW_S) is None
    assert decode_server(noise, encode_tombstone(EXPIRES_S, ME), NOW_S) is None
    assert decode_server(owner(), seal(noise, EXPIRES_S, ME), NOW_S) is None
    assert decode_model(owner(), seal(noise, EXPIRES_S, ME), NOW_S) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(encode_server(a_record(), EXPIRES_S, ME))
    position = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[position // 8] ^= 1 << position % 8
    assert decode_server(owner(), bytes(sealed), NOW_S) is None


# What DHT nodes accept ---------------------------------------------------------


def stored(subkey: object, value: object, expires_s: float) -> DHTRecord:
    encode = msgspec.msgpack.encode
    return DHTRecord(b"key", encode(subkey), encode(value), expires_s)


def test_nodes_store_only_what_its_owner_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW_S)
    validator = OwnedValues()
    sealed = encode_server(a_record(), EXPIRES_S, ME)
    assert validator.validate(stored(owner(), sealed, EXPIRES_S))
    assert validator.validate(stored(owner(), encode_tombstone(EXPIRES_S, ME), EXPIRES_S))
    assert not validator.validate(stored(owner(OTHER), sealed, EXPIRES_S))
    assert not validator.validate(stored(owner(), sealed, EXPIRES_S + 1))
    assert not validator.validate(stored(None, sealed, EXPIRES_S)), "no owner tag"
    assert not validator.validate(stored("text", sealed, EXPIRES_S))
    assert not validator.validate(stored(owner(), "text", EXPIRES_S))
    assert not validator.validate(DHTRecord(b"key", b"", b"", EXPIRES_S))
    far = NOW_S + records.MAX_LIFETIME_S + 1
    assert not validator.validate(stored(owner(), encode_server(a_record(), far, ME), far))


# Keys ----------------------------------------------------------------------------


def test_every_block_of_a_span_is_found_under_two_keys() -> None:
    for start, end in ((0, 1), (0, 32), (31, 33), (32, 64), (10, 80)):
        written = set(span_keys("f", Span(start, end)))
        for block in range(start, end):
            read = set(span_keys("f", Span(block, block + 1)))
            assert len(read) == 2 and read <= written


def test_keys_of_models_never_meet() -> None:
    one, other = set(span_keys("one", Span(0, 80))), set(span_keys("other", Span(0, 80)))
    assert not one & other and not one & set(model_keys())
    assert PeerId("x") == "x"
