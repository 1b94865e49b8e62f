"""The call of torch's varlen kernel, as far as a machine without CUDA can check it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bloombee.kv.paged_attention import VarlenRows, attend_varlen, kernel_fits


def test_the_installed_kernel_takes_our_arguments() -> None:
    """Names, order and types pass through torch's own operator, on tensors without memory."""
    with FakeTensorMode():
        rows = VarlenRows(
            packed=None,
            starts=torch.zeros(4, dtype=torch.int32),
            used=torch.zeros(3, dtype=torch.int32),
            key_starts=torch.zeros(4, dtype=torch.int32),
            table=torch.zeros((3, 5), dtype=torch.int32),
            longest_query=7,
            longest_key=700,
        )
        query = torch.zeros((9, 8, 64), dtype=torch.bfloat16)
        pages = torch.zeros((20, 256, 2, 64), dtype=torch.bfloat16)
        out = attend_varlen(query, (pages, pages), rows, 0.125, window=100)
        assert out.shape == (9, 8, 64)
        assert out.dtype == torch.bfloat16


def test_no_kernel_without_cuda() -> None:
    assert not kernel_fits(torch.bfloat16, 64, torch.device("cpu"))
