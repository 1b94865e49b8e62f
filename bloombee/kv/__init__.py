"""Page pool, page tables and attention over them; nobody else knows the layout."""

from __future__ import annotations

import torch

from bloombee.errors import SettingsError
from bloombee.kv.contiguous import make_contiguous
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape
from bloombee.kv.paged import make_paged
from bloombee.kv.paged_attention import KERNEL_PAGE_TOKENS

CPU_PAGE_TOKENS = 64

__all__ = ["AttendPlan", "BatchItem", "KVPool", "KVShape", "make_pool"]


def make_pool(
    shape: KVShape, total_tokens: int, *, max_length: int, page_tokens: int | None = None
) -> KVPool:
    """A pool of at least `total_tokens` for sequences of up to `max_length` tokens.

    `total_tokens` is rounded up to pages of `page_tokens` (default: 64 on CPU, 256
    elsewhere). Memory is committed as tokens arrive on CPU, at once on other devices.
    Raises SettingsError for sizes that are not positive or that the device can't have.
    """
    on_cpu = shape.device.type == "cpu"
    page = page_tokens or (CPU_PAGE_TOKENS if on_cpu else KERNEL_PAGE_TOKENS)
    if min(total_tokens, max_length, page) < 1:
        raise SettingsError(
            f"a KV pool of {total_tokens} tokens for sequences of {max_length} in pages of "
            f"{page}: all must be positive"
        )
    if shape.device.type == "cuda" and page % KERNEL_PAGE_TOKENS:
        raise SettingsError(
            f"KV pages of {page} tokens: on CUDA they are multiples of {KERNEL_PAGE_TOKENS}"
        )
    make = make_contiguous if on_cpu else make_paged
    # Tensors made in inference mode could not be written outside it later.
    with torch.inference_mode(mode=False):
        return make(shape, -(-total_tokens // page), max_length, page)
