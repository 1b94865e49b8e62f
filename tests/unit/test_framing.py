"""Frames: what was encoded comes back; whatever else arrives is a ProtocolError."""

from __future__ import annotations

import struct
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import SessionId
from bloombee.errors import ProtocolError
from bloombee.protocol import framing
from bloombee.protocol import messages as m

SESSION = SessionId(b"s" * 16)
PAYLOAD = m.Payload("rows", "bfloat16", 3, 4)
STEP = m.Step(
    SESSION, 1, 2, "verify", (0, 1), (5, 6), (1, 2), PAYLOAD, parents=(-1, -1, 0),
    operations=m.Operations(forks=((1, 0),), truncates=((0, 3),), releases=(2,)),
    timings=(m.Timing("p", 1.0, 2.0, 3.0, 4.0, 5.0),),
)  # fmt: skip
HOP = m.Hop("peer", "host:1", bytes(32))
SAMPLES: tuple[m.AnyMessage, ...] = (
    m.Challenge((1, 2), "peer", bytes(16), 1.5),
    m.Hello(1, "peer", b"key", 1.5, b"signature", b"proof"),
    m.Open(
        SESSION, bytes(16), 3, "print", 0, 10, 8, 2048, "bfloat16", next=HOP, ring=HOP,
        stages=3, background=True,
    ),
    m.Failed(SESSION, 0, 0, "kv-full", "3 tokens free, 8 asked for"),
    STEP,
    m.Output(SESSION, 1, 2, PAYLOAD),
    m.Output(
        SESSION, 1, 2, PAYLOAD, sequences=(3,), positions=(7,), finished=("stop",),
        logprobs=(-0.5,), alternatives=(((1, -0.5), (2, -1.5)),),
    ),
)  # fmt: skip


def joined(message: m.AnyMessage, payload: bytes = b"") -> bytes:
    return b"".join(framing.encode(message, payload))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda each: type(each).__name__)
def test_messages_come_back(message: m.AnyMessage) -> None:
    assert framing.decode(joined(message)) == (message, b"")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_payloads_come_back_aligned_and_uncopied(payload: bytes, length: int) -> None:
    step = msgspec.structs.replace(STEP, timings=(m.Timing("p" * length, 0.0, 0.0, 0.0, 0.0, 0.0),))
    frame = joined(step, payload)
    decoded = framing.decode(frame)
    assert decoded is not None
    message, view = decoded
    assert (message, view) == (step, payload)
    assert view.obj is frame
    if payload:
        assert (len(frame) - len(payload)) % 16 == 0


def test_a_keep_alive_is_nothing() -> None:
    assert framing.decode(framing.KEEP_ALIVE) is None


def decode_or_refuse(frame: bytes) -> None:
    """Anything but a result or a ProtocolError fails the test."""
    try:
        result = framing.decode(frame)
    except ProtocolError as error:
        assert str(error).isprintable()
    else:
        assert result is None or isinstance(result[0], typing.get_args(m.AnyMessage))


FRAMES = tuple(joined(each) for each in SAMPLES) + (joined(STEP, bytes(24)),)


@given(st.sampled_from(FRAMES), st.data())
def test_a_truncated_or_lengthened_frame_is_refused(frame: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolError):
        framing.decode(frame[:cut])
    with pytest.raises(ProtocolError):
        framing.decode(frame + data.draw(st.binary(min_size=1, max_size=40)))


@settings(max_examples=400)
@given(st.sampled_from(FRAMES), st.data())
def test_corrupted_frames_never_raise_anything_else(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(damaged))


@settings(max_examples=500)
@given(st.binary(max_size=100))
def test_noise_never_raises_anything_else(noise: bytes) -> None:
    decode_or_refuse(noise)
    # And as the message of a frame with a right head.
    decode_or_refuse(struct.pack("<BII", 1, len(noise), 0) + noise)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
        | st.binary(max_size=20) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=30,
    ),
    st.sampled_from([type(each).__name__ for each in SAMPLES]),
)  # fmt: skip
def test_wrong_fields_never_raise_anything_else(fields: object, tag: str) -> None:
    listed = fields if isinstance(fields, list) else [fields]
    body = msgspec.msgpack.encode([tag, *listed])
    decode_or_refuse(struct.pack("<BII", 1, len(body), 0) + body)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "truncated"),
        (b"\x01\x00", "truncated"),
        (b"\x07" + bytes(8), "kind 7"),
        (struct.pack("<BII", 1, framing.MAX_MESSAGE_BYTES + 1, 0), "limit"),
        (struct.pack("<BII", 1, 0xFFFFF, 0xFFFFFFFF), "announces"),
        (struct.pack("<BII", 1, 1, 0) + b"\xc0", "malformed"),
        (struct.pack("<BII", 1, 100_000, 0) + b"\x91" * 100_000, "malformed"),
    ],
)
def test_what_is_wrong_is_said(frame: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        framing.decode(frame)


def test_bytes_that_no_payload_describes_and_dirty_padding_are_refused() -> None:
    with pytest.raises(ProtocolError, match="Failed carries 3 bytes"):
        framing.decode(joined(SAMPLES[3], b"abc"))
    step = msgspec.structs.replace(STEP, timings=())
    head, body, padding, payload = framing.encode(step, b"abcd")
    assert len(padding) > 0
    with pytest.raises(ProtocolError, match="padding"):
        framing.decode(b"".join((head, body, b"\x01" * len(padding), payload)))


@pytest.mark.parametrize(
    "change",
    [
        {"session": b"short"},
        {"epoch": -1},
        {"epoch": 1 << 32},
        {"step": 1 << 63},
        {"phase": "dream"},
        {"first_positions": (1 << 31,)},
        {"parents": (-2,)},
        {"want": "some"},
        {"payload": msgspec.structs.replace(PAYLOAD, dtype="float64")},
        {"payload": msgspec.structs.replace(PAYLOAD, rows=-1)},
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        framing.decode(joined(msgspec.structs.replace(STEP, **change)))
