"""Page pool, page tables and attention over them; nobody else knows the layout."""

from __future__ import annotations

import torch

from bloombee.errors import SettingsError
from bloombee.kv.contiguous import make_contiguous
from bloombee.kv.interface import AttendPlan, BatchItem, KVPool, KVShape

CPU_PAGE_TOKENS = 64

__all__ = ["AttendPlan", "BatchItem", "KVPool", "KVShape", "make_pool"]


def make_pool(
    shape: KVShape, total_tokens: int, *, max_length: int, page_tokens: int | None = None
) -> KVPool:
    """A pool of at least `total_tokens` for sequences of up to `max_length` tokens.

    `total_tokens` is rounded up to pages of `page_tokens` (default: 64 on CPU).
    Memory is committed as tokens arrive on CPU, at once on other devices.
    Raises SettingsError for sizes that are not positive or can't be had.
    """
    if total_tokens < 1 or max_length < 1 or (page_tokens is not None and page_tokens < 1):
        raise SettingsError(
            f"a KV pool of {total_tokens} tokens for sequences of {max_length} in pages of "
            f"{page_tokens}: all must be positive"
        )
    # Tensors made in inference mode could not be written outside it later.
    with torch.inference_mode(mode=False):
        page = page_tokens or CPU_PAGE_TOKENS
        return make_contiguous(shape, -(-total_tokens // page), max_length, page)
