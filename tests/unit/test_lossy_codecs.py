"""Lossy codecs: as near as their names promise, the same alone and in company, or refused."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bloombee.compression import LOSSY, decode, encode, wire_dtype
from bloombee.config.fields import CodecName
from bloombee.errors import ProtocolError, RequestError

SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-40, 6e-8, 1e-3, 1.0, -300.0, 6e4, 3.4028234e38])
UNITS = {"lossy-bf16": 2.0**-8, "lossy-fp16": 2.0**-11}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def there_and_back(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    used, body = encode(tensor, codec)
    assert used == codec
    again = decode(body, used, wire_dtype(tensor.dtype), *tensor.shape)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    return again


def test_settings_know_all_codecs_and_no_lossy_one_hides_it() -> None:
    assert {name for name in get_args(CodecName) if name.startswith("lossy-")} == set(LOSSY)
    for name in get_args(CodecName):
        if name != "auto":
            encode(torch.ones(2, 3), name)


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.integers(0, 9),
    width=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
    special=st.booleans(),
)
@example(torch.float32, 1, 1, 0, True)
def test_int8_is_within_half_a_unit_of_its_row(
    dtype: torch.dtype, rows: int, width: int, seed: int, special: bool
) -> None:
    random = np.random.default_rng(seed)
    values = random.choice(SPECIAL, (rows, width)) if special else random.normal(size=(rows, width))
    tensor = torch.from_numpy(values).to(dtype).nan_to_num(posinf=1.0)
    again = there_and_back(tensor, "lossy-int8")
    assert bool(again.isfinite().all())
    if tensor.numel():
        largest = tensor.double().abs().amax(dim=1, keepdim=True)
        rounding = largest * torch.finfo(dtype).eps + torch.finfo(torch.float32).tiny
        allowed = largest / 254 * 1.001 + rounding
        assert bool(((again.double() - tensor.double()).abs() <= allowed).all())


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(sorted(UNITS)),
    rows=st.integers(0, 9),
    width=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_cut_numbers_are_the_nearest_of_their_kind(
    codec: str, rows: int, width: int, seed: int
) -> None:
    kind = torch.bfloat16 if codec == "lossy-bf16" else torch.float16
    tensor = torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, width)) * 30).float()
    again = there_and_back(tensor, codec)
    assert bits(again) == bits(tensor.to(kind).float())
    smallest = torch.finfo(kind).smallest_normal
    near = (again - tensor).abs() <= UNITS[codec] * tensor.abs() + smallest
    assert bool(near.all())


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_not_finite_survives_or_is_refused(codec: str) -> None:
    for bad in (float("inf"), -float("inf"), float("nan")):
        tensor = torch.ones(3, 5)
        tensor[1, 2] = bad
        if codec == "lossy-int8":
            with pytest.raises(RequestError, match="NaN"):
                encode(tensor, codec)
        else:
            again = there_and_back(tensor, codec)
            assert torch.equal(again.nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_numbers_beyond_fp16_are_refused() -> None:
    with pytest.raises(RequestError, match="lossy-bf16"):
        encode(torch.full((2, 3), 7e4), "lossy-fp16")
    assert there_and_back(torch.full((2, 3), 65504.0), "lossy-fp16")[0, 0] == 65504


@pytest.mark.parametrize("codec", LOSSY)
def test_rows_come_out_alone_as_they_do_among_many(codec: str) -> None:
    tensor = torch.randn(64, 576, generator=torch.Generator().manual_seed(1))
    together = there_and_back(tensor, codec)
    for row in (0, 17, 63):
        assert bits(there_and_back(tensor[row : row + 1], codec)) == bits(together[row : row + 1])
    assert bits(there_and_back(together, codec)) == bits(together) or codec == "lossy-int8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("codec", ["lossy-bf16", "lossy-fp16"])
def test_what_has_nothing_to_lose_stays_exact(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.randint(-9999, 9999, (8, 24)).to(dtype)
    assert bits(there_and_back(tensor, codec)) == bits(tensor)


def test_sizes_are_those_of_the_smaller_numbers() -> None:
    tensor = torch.randn(64, 576, generator=torch.Generator().manual_seed(1))
    sizes = {codec: len(encode(tensor, codec)[1]) / tensor.nbytes for codec in LOSSY}
    assert sizes["lossy-int8"] < 0.25
    assert sizes["lossy-bf16"] < 0.36
    assert sizes["lossy-fp16"] < 0.46


@pytest.mark.parametrize("codec", LOSSY)
def test_no_damaged_byte_goes_unnoticed(codec: str) -> None:
    tensor = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    frame = bytes(encode(tensor, codec)[1])
    for position in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(frame)
            bad[position] ^= flip
            with pytest.raises(ProtocolError):
                decode(bad, codec, "float32", 7, 12)
    for cut in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:cut], codec, "float32", 7, 12)
    for rows, width, dtype in ((12, 7, "float32"), (7, 11, "float32"), (6, 12, "float32")):
        with pytest.raises(ProtocolError):
            decode(frame, codec, dtype, rows, width)
