"""The split codec: every bit comes back, repeats travel once, no damage goes unnoticed."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bloombee.compression import decode, encode, wire_dtype
from bloombee.compression.entropy import entropy
from bloombee.compression.layout import Layout
from bloombee.compression.lent import Lender
from bloombee.compression.planes import MOST_VALUES, strips
from bloombee.compression.split import REPEATS, SplitCodec
from bloombee.errors import ProtocolError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, *FP8)
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 6e-8, 3.4e38)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(tensor: torch.Tensor) -> int:
    """Encode and decode; the frame's size."""
    codec = SplitCodec()
    frame = codec.encode(tensor)
    again = codec.decode(frame, Layout(tensor.dtype, *tensor.shape))
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert bits(again) == bits(tensor)
    return len(frame)


def hidden(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Like hidden states: few exponents, noisy mantissas."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 40),
    width=st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["bits", "numbers", "special", "constant"]),
    copies=st.integers(1, 4),
)
@example(torch.bfloat16, 1, 2048, 0, "numbers", 1)
@example(torch.float32, 40, 576, 0, "numbers", 4)
@example(torch.bfloat16, 33, 63, 0, "special", 2)
def test_every_bit_comes_back(
    dtype: torch.dtype, rows: int, width: int, seed: int, kind: str, copies: int
) -> None:
    random = np.random.default_rng(seed)
    if kind == "bits":
        raw = random.integers(0, 256, rows * width * dtype.itemsize, dtype=np.uint8)
        tensor = torch.empty(rows, width, dtype=dtype)
        if raw.size:
            tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(raw))
    elif kind == "special":
        tensor = torch.from_numpy(random.choice(np.array(SPECIAL), (rows, width)))
        tensor = tensor.nan_to_num(7, 8, 9).to(dtype) if dtype is torch.int32 else tensor.to(dtype)
    elif kind == "constant":
        tensor = torch.full((rows, width), 3).to(dtype)
    else:
        tensor = torch.from_numpy(random.normal(size=(rows, width)) * 100).to(dtype)
    same(tensor.repeat_interleave(copies, dim=0))


@pytest.mark.parametrize(("dtype", "planes"), [(torch.bfloat16, 2), (torch.float16, 2)])
def test_as_small_as_the_entropy_of_its_planes_allows(dtype: torch.dtype, planes: int) -> None:
    tensor = hidden(256, 576, dtype)
    raw = np.frombuffer(bits(tensor), np.uint8)
    bound = sum(entropy(raw[plane::planes]) / 8 for plane in range(planes)) * tensor.numel()
    assert same(tensor) <= 1.03 * bound < 0.95 * tensor.nbytes


def test_noise_is_stored_not_swollen() -> None:
    noise = torch.randint(-(2**31), 2**31 - 1, (64, 64), dtype=torch.int32)
    assert same(noise) <= noise.nbytes + 64


@pytest.mark.parametrize("dtype", [*DTYPES[:3], *FP8])
def test_repeated_rows_travel_once(dtype: torch.dtype) -> None:
    once = hidden(50, 576, dtype)
    order = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(2))
    assert same(once[order]) < same(once) + 4 * 400 + 128


def test_rows_that_only_look_alike_stay_apart() -> None:
    tensor = torch.zeros(64, 48, dtype=torch.bfloat16)
    tensor[:, 5] = torch.arange(64)  # where the quick look does not look
    same(tensor)


def test_what_is_worth_coding_is_asked_again() -> None:
    codec = SplitCodec()
    noise = torch.randint(0, 2**15, (64, 64), dtype=torch.int32).view(torch.bfloat16)
    smooth = hidden(64, 128, torch.bfloat16)
    for _ in range(40):
        codec.encode(noise)
    sizes = [len(codec.encode(smooth)) for _ in range(70)]
    assert sizes[-1] < 0.8 * smooth.nbytes


@pytest.mark.parametrize("repeats", [1, 6])
def test_no_damaged_byte_goes_unnoticed(repeats: int) -> None:
    tensor = hidden(12, 40, torch.bfloat16).repeat_interleave(repeats, dim=0)
    codec, layout = SplitCodec(), Layout(torch.bfloat16, 12 * repeats, 40)
    frame = bytes(codec.encode(tensor))
    for position in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(frame)
            bad[position] ^= flip
            with pytest.raises(ProtocolError):
                codec.decode(bad, layout)
    for cut in range(len(frame)):
        with pytest.raises(ProtocolError):
            codec.decode(frame[:cut], layout)
    with pytest.raises(ProtocolError):
        codec.decode(frame + b"\0", layout)


def framed(body: bytes) -> bytes:
    """With the checksum that a liar would give it."""
    return body + xxhash.xxh3_64_digest(body)


def test_lies_with_a_right_checksum_are_refused_too() -> None:
    tensor = hidden(12, 40, torch.bfloat16).repeat_interleave(6, dim=0)
    codec, layout = SplitCodec(), Layout(torch.bfloat16, 72, 40)
    body = bytes(codec.encode(tensor))[:-8]
    codec.decode(framed(body), layout)
    assert body[1] & REPEATS
    table_at = 12 + 4 * 73
    for position in (*range(12), *range(12, 16), table_at, table_at + 3, table_at + 7):
        lie = bytearray(body)
        lie[position] ^= 0x81
        with pytest.raises(ProtocolError):
            codec.decode(framed(bytes(lie)), layout)
    lie = bytearray(body)
    lie[16:20] = (12).to_bytes(4, "little")  # one row more than there are
    with pytest.raises(ProtocolError, match="does not hold"):
        codec.decode(framed(bytes(lie)), layout)
    for cut in range(len(body)):
        with pytest.raises(ProtocolError):
            codec.decode(framed(body[:cut]), layout)
    for position in range(table_at + 8, len(body)):
        lie = bytearray(body)
        lie[position] ^= 0xFF  # another matrix, or none: but no other error, and no more memory
        with contextlib.suppress(ProtocolError):
            assert codec.decode(framed(bytes(lie)), layout).shape == (72, 40)


@pytest.mark.parametrize("values", [196608, 196609, 400_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, *FP8])
def test_long_matrices_are_cut_into_strips(values: int, dtype: torch.dtype) -> None:
    cuts = strips(values)
    assert sum(cut.stop - cut.start for cut in cuts) == values
    assert max(cut.stop - cut.start for cut in cuts) <= MOST_VALUES
    assert same(hidden(1, values, dtype)) < 0.95 * values * dtype.itemsize


def test_memory_is_used_again_only_when_nobody_reads_it() -> None:
    codec, layout = SplitCodec(), Layout(torch.bfloat16, 64, 576)
    tensors = [hidden(64, 576, torch.bfloat16, seed) for seed in range(12)]
    frames = [codec.encode(tensor) for tensor in tensors]
    rows = [codec.decode(frame, layout)[3:] for frame in frames]
    parts = [memoryview(frame)[4:8] for frame in frames]
    assert len({each.data_ptr() for each in rows}) == len(rows)
    for tensor, frame, row in zip(tensors, frames, rows, strict=True):
        assert bits(row) == bits(tensor[3:])
        assert bits(codec.decode(frame, layout)) == bits(tensor)
    assert len(parts) == len(frames)
    lender = Lender()
    first = id(lender.lend(100_000))
    assert id(lender.lend(50_000)) == first
    view = memoryview(lender.lend(50_000))[10:20]
    assert id(lender.lend(50_000)) != first
    del view
    assert id(lender.lend(50_000)) == first


def test_a_frame_of_another_shape_or_dtype_is_refused() -> None:
    codec, frame = SplitCodec(), SplitCodec().encode(hidden(6, 8, torch.bfloat16))
    for layout in (
        Layout(torch.bfloat16, 8, 6),
        Layout(torch.bfloat16, 6, 9),
        Layout(torch.float32, 6, 8),
        Layout(torch.bfloat16, 1 << 30, 8),
    ):
        with pytest.raises(ProtocolError, match="announced as"):
            codec.decode(frame, layout)


def test_through_the_front_door_small_tensors_stay_raw() -> None:
    small, large = hidden(2, 576, torch.bfloat16), hidden(32, 576, torch.bfloat16)
    for tensor, used in ((small, "raw"), (large, "split")):
        codec, body = encode(tensor, "split")
        assert codec == used
        again = decode(body, codec, wire_dtype(tensor.dtype), *tensor.shape)
        assert bits(again) == bits(tensor)


def test_threads_share_it() -> None:
    codec, errors = SplitCodec(), list[BaseException]()

    def work(seed: int) -> None:
        try:
            for turn in range(50):
                tensor = hidden(1 + turn, 64, torch.float16, seed + turn)
                frame = codec.encode(tensor)
                assert bits(codec.decode(frame, Layout(torch.float16, 1 + turn, 64))) == bits(
                    tensor
                )
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
