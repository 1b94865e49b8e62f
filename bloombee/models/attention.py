"""The attention function that transformers' layers call: ours, over pages of KV.

A layer runs on `[1, T, D]` and hands queries, keys and values as `[1, H, T, E]`.
What the step knows (pool and plan) comes along in the layer's keyword arguments,
which every family on the attention interface passes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from transformers import AttentionInterface

from bloombee.kv.interface import AttendPlan, KVPool

ATTENTION = "bloombee_packed"


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step on one span: where its KV goes."""

    pool: KVPool
    plan: AttendPlan


def packed_attention(  # noqa: PLR0913 - transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_step: PackedStep,
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write K and V `[1, K, T, E]` into the pool and attend; returns `[1, T, H, E]`.

    Causality comes from the plan, so `attention_mask` is always None. Modifies the pool.
    """
    block = cast("int", module.layer_idx)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [T, H, E]
    out = packed_step.pool.attend(
        packed_step.plan, block, q, k, v, scaling=scaling, window=sliding_window
    )
    return out.unsqueeze(0), None


def register_attention() -> str:
    """Make the function known to transformers; returns the name that configs select it by."""
    AttentionInterface.register(ATTENTION, packed_attention)
    return ATTENTION
