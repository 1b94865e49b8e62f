"""Codecs: bytes are exact, nothing is copied, and no lie in a payload is believed."""

from __future__ import annotations

import warnings

import pytest
import torch

from bloombee.compression import decode, encode, torch_dtype, wire_dtype
from bloombee.errors import ProtocolError, RequestError, Unsupported

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def matrix(dtype: torch.dtype, rows: int = 5, width: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-(2**31), 2**31 - 1, (rows, width), generator=generator)
    # All bit patterns, so NaNs and infinities too.
    return values.to(torch.int32).view(dtype)[:, :width].contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_returns_the_same_bits(dtype: torch.dtype) -> None:
    tensor = matrix(dtype)
    codec, buffer = encode(tensor)
    again = decode(bytes(buffer), codec, wire_dtype(dtype), 5, 7)
    assert (codec, again.dtype, again.shape) == ("raw", dtype, tensor.shape)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))
    assert torch_dtype(wire_dtype(dtype)) is dtype


def test_raw_copies_neither_way_and_does_not_warn_of_read_only_memory() -> None:
    tensor = matrix(torch.bfloat16)
    _, buffer = encode(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = decode(memoryview(buffer).toreadonly(), "raw", "bfloat16", 5, 7)
    assert again.data_ptr() == tensor.data_ptr()


def test_a_decoded_tensor_keeps_its_memory_alive() -> None:
    frame = b"head" + bytes(range(64))
    tensor = decode(memoryview(frame)[4:], "raw", "int32", 4, 4)
    expected = tensor.clone()
    del frame
    rubbish = [bytes(68) for _ in range(1000)]
    assert torch.equal(tensor, expected)
    assert len(rubbish) == 1000


def test_strided_and_gradient_tensors_are_encoded_by_value() -> None:
    tensor = matrix(torch.float32).nan_to_num(0.0).requires_grad_()
    codec, buffer = encode(tensor.T)
    assert torch.equal(decode(buffer, codec, "float32", 7, 5), tensor.detach().T)


@pytest.mark.parametrize(("rows", "width"), [(0, 7), (0, 0), (3, 0)])
def test_empty_matrices_travel(rows: int, width: int) -> None:
    codec, buffer = encode(torch.empty((rows, width), dtype=torch.bfloat16))
    assert decode(buffer, codec, "bfloat16", rows, width).shape == (rows, width)


@pytest.mark.parametrize(
    ("rows", "width"), [(5, 8), (4, 7), (0, 7), (2**30, 2**30), (-5, -7), (-1, 7)]
)
def test_bytes_that_do_not_fit_the_shape_are_refused(rows: int, width: int) -> None:
    _, buffer = encode(matrix(torch.float32))
    with pytest.raises(ProtocolError):
        decode(buffer, "raw", "float32", rows, width)
    with pytest.raises(ProtocolError, match="13 bytes"):
        decode(bytes(13), "raw", "float32", max(rows, 1), max(width, 1))


def test_unknown_names_are_typed_errors() -> None:
    with pytest.raises(Unsupported, match="zip"):
        decode(b"", "zip", "float32", 0, 1)
    with pytest.raises(Unsupported, match="zip"):
        encode(matrix(torch.float32), "zip")
    with pytest.raises(ProtocolError, match="float64"):
        decode(b"", "raw", "float64", 0, 1)
    with pytest.raises(RequestError, match="float64"):
        wire_dtype(torch.float64)
    with pytest.raises(RequestError, match="matrices"):
        encode(torch.zeros(1, 2, 3))
