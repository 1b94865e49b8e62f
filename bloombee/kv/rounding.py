"""Do two widths of a product round alike? Asked of the machine's kernels, once per question.

A row that attends over `narrow` tokens alone may sit in a batch that is `wide`,
with zeros behind its end. Its result must not change by a bit. Whether the
matrix kernels sum in the same order then depends on the library, the processor
and the shape (float32, 4 heads a group: 256 and 384 differ; bfloat16: 1,024 and
1,536 differ), so it is tried on numbers chosen to show any change of order.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from bloombee.kv.contiguous_attention import scaled_scores


@lru_cache(maxsize=65536)
def same_rounding(dtype: torch.dtype, rows: int, head_size: int, narrow: int, wide: int) -> bool:
    """Whether `rows` queries get equal bits from `narrow` tokens and from `wide` padded ones."""
    if narrow == wide:
        return True
    noise = torch.Generator().manual_seed(narrow)
    nothing = torch.zeros((1, 1, 1), dtype=dtype)
    query = _spread((1, rows, head_size), dtype, noise)
    keys = _spread((1, wide, head_size), dtype, noise)
    values = _cancelling(narrow, wide, head_size, dtype, noise)
    weights = torch.zeros((1, rows, wide), dtype=dtype)
    weights[..., :narrow] = 1
    scores = [scaled_scores(keys[:, :n], query, 1.0, nothing)[..., :narrow] for n in (narrow, wide)]
    sums = [torch.bmm(weights[..., :n].contiguous(), values[:, :n]) for n in (narrow, wide)]
    logits = torch.randn((1, rows, wide), generator=noise).to(dtype)
    logits[..., narrow:] = -torch.inf
    chances = [torch.softmax(logits[..., :n], -1)[..., :narrow] for n in (narrow, wide)]
    return all(torch.equal(alone, padded) for alone, padded in (scores, sums, chances))


def _spread(shape: tuple[int, ...], dtype: torch.dtype, noise: torch.Generator) -> torch.Tensor:
    """Numbers over many magnitudes: no two orders of summing them agree."""
    exponents = torch.randint(-8, 8, shape, generator=noise)
    return (torch.randn(shape, generator=noise) * 2.0**exponents).to(dtype)


def _cancelling(
    narrow: int, wide: int, head_size: int, dtype: torch.dtype, noise: torch.Generator
) -> torch.Tensor:
    """`narrow` values that sum to zero but for rounding, then zeros: `[1, wide, E]`.

    What is left is all rounding error, so it survives being rounded to 16 bits.
    """
    half = narrow // 2
    values = torch.zeros((1, wide, head_size), dtype=dtype)
    values[:, :half] = _spread((1, half, head_size), dtype, noise)
    order = torch.randperm(half, generator=noise)
    values[:, half : 2 * half] = -values[:, order]
    return values
