"""Attention over paged keys and values: torch's varlen kernel, its twin, and trees.

`varlen_attn` reads pages in place. Its FlashAttention 2 backend wants pages of a
multiple of 256 tokens, 16-bit floats, heads of up to 256 elements in eights, and
int32 tables. It is told not to split the keys (`num_splits=1`): with pages and
more than one split torch 2.13 leaves rows unwritten (pytorch issue 194167), and
one split is also what makes a row's bits independent of the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from jaxtyping import Bool, Float, Int

KERNEL_PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class VarlenRows:
    """Chained rows as the kernel wants them; all tensors on the pool's device.

    `packed`: their tokens among the step's, None when they are all of them.
    `starts` (of queries) and `key_starts` `[rows + 1]`, `used` (keys) `[rows]` and
    `table` `[rows, pages]` are int32.
    """

    packed: Int[torch.Tensor, "T"] | None
    starts: Int[torch.Tensor, "R1"]
    used: Int[torch.Tensor, "R"]
    key_starts: Int[torch.Tensor, "R1"]
    table: Int[torch.Tensor, "R M"]
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """One row that is gathered: packed tokens `[start, stop)`, its pages and what is seen."""

    start: int
    stop: int
    pages: Int[torch.Tensor, "M"]
    seen: Bool[torch.Tensor, "C N"]


Pages = Float[torch.Tensor, "n P K E"]


def kernel_fits(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Whether the varlen kernel serves this device, dtype and head size."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256


def attend_varlen(
    query: Float[torch.Tensor, "T H E"],
    pages: tuple[Pages, Pages],
    rows: VarlenRows,
    scaling: float,
    window: int | None,
) -> Float[torch.Tensor, "T H E"]:
    """The kernel, on CUDA."""
    # Its module imports the compiler: two seconds that a server on CPU never needs.
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        query,
        *pages,
        rows.starts,
        rows.key_starts,
        rows.longest_query,
        rows.longest_key,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=rows.used,
        block_table=rows.table,
        num_splits=1,
    )
    if not isinstance(result, torch.Tensor):
        raise TypeError("varlen_attn returned more than was asked for")
    return result


def attend_varlen_plain(
    query: Float[torch.Tensor, "T H E"],
    pages: tuple[Pages, Pages],
    rows: VarlenRows,
    scaling: float,
    window: int | None,
) -> Float[torch.Tensor, "T H E"]:
    """The kernel's twin for devices without it: same arguments, pages gathered."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = rows.starts.tolist()
    for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        used, count = int(rows.used[row]), stop - start
        at = torch.arange(used - count, used)[:, None] - torch.arange(used)
        seen = (at >= 0) if window is None else (at >= 0) & (at < window)
        held = MaskedRow(start, stop, rows.table[row].long(), seen)
        out[start:stop] = attend_masked(query[start:stop], pages, held, scaling)
    return out


def attend_masked(
    query: Float[torch.Tensor, "C H E"],
    pages: tuple[Pages, Pages],
    row: MaskedRow,
    scaling: float,
) -> Float[torch.Tensor, "C H E"]:
    """One row under an explicit mask, its pages gathered: trees, and float32 on CUDA."""
    tokens = row.seen.shape[1]
    keys, values = (page[row.pages].flatten(0, 1)[:tokens].transpose(0, 1) for page in pages)
    result = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=row.seen,
        scale=scaling,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)
