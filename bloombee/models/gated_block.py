"""Hand-written layers for the Llama family: rotary, grouped heads, RMS norms, gated MLP.

The same numbers as transformers' layers, bit for bit on CPU, with fewer and
larger products (Q, K and V in one, gate and up in one) and half the Python. The plain
twin is TransformersBlock; tests hold one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import nn
from torch.nn.functional import rms_norm, silu

from bloombee.models.block import BlockStep
from bloombee.models.spec import GatedLayers

Product = Callable[[torch.Tensor], torch.Tensor]


class GatedBlock:
    """One layer of the family, made from transformers' layer with its weights loaded.

    `product` turns an nn.Linear into the function that computes it. The layer's own
    projections are used up: their memory is free once the caller drops the layer.
    """

    def __init__(
        self, layer: nn.Module, settings: GatedLayers, product: Callable[[nn.Linear], Product]
    ) -> None:
        attention, mlp = cast("Any", layer.self_attn), cast("Any", layer.mlp)
        self._block: int = attention.layer_idx
        self._scaling: float = attention.scaling
        self._window: int | None = (
            attrgetter(settings.window)(attention) if settings.window else None
        )
        size = self._head_size = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // size
        self._turned = self._heads + attention.k_proj.out_features // size
        self._inner: int = mlp.gate_proj.out_features
        self._norm_in = _norm(cast("Any", layer.input_layernorm))
        self._norm_mlp = _norm(cast("Any", layer.post_attention_layernorm))
        self._norm_heads = (
            (_norm(attention.q_norm), _norm(attention.k_norm)) if settings.head_norms else None
        )
        self._qkv = product(_fused([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._out = product(attention.o_proj)
        self._gate_up = product(_fused([mlp.gate_proj, mlp.up_proj]))
        self._down = product(mlp.down_proj)
        self._activation = silu if isinstance(mlp.act_fn, nn.SiLU) else _on_whole_rows(mlp.act_fn)

    def __call__(
        self, rows: Float[torch.Tensor, "T D"], step: BlockStep
    ) -> Float[torch.Tensor, "T D"]:
        """Run the layer; writes K and V of the new tokens into the step's pool."""
        attended = self._attend(self._norm_in(rows), step)
        rows = self._out(attended.reshape(len(rows), -1)).add_(rows)
        both = self._gate_up(self._norm_mlp(rows))  # [T, 2 I]
        gated = self._activation(both[:, : self._inner]).mul_(both[:, self._inner :])
        return self._down(gated).add_(rows)

    def _attend(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        heads, turned, size = self._heads, self._turned, self._head_size
        qkv = self._qkv(normed).view(len(normed), -1, size)  # [T, H + 2 K, E]
        if self._norm_heads is None:
            qk = qkv[:, :turned]
        else:
            norm_q, norm_k = self._norm_heads
            qk = torch.cat((norm_q(qkv[:, :heads]), norm_k(qkv[:, heads:turned])), dim=1)
        cos, sin = step.turn
        half = size // 2
        swapped = torch.cat((qk[..., half:], qk[..., :half]), dim=-1).mul_(sin)
        qk = (qk * cos).add_(swapped)
        return step.packed.pool.attend(
            step.packed.plan,
            self._block,
            qk[:, :heads],
            qk[:, heads:],
            qkv[:, turned:],
            scaling=self._scaling,
            window=self._window,
        )


def _fused(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of all, in order. Their biases are all there or none."""
    weight = torch.cat([layer.weight for layer in layers])
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
        fused.bias = nn.Parameter(bias, requires_grad=False)
    return fused


def _on_whole_rows(activation: Product) -> Product:
    # GELU takes another kernel for a part of longer rows than for the single row of a decode step.
    return lambda x: activation(x.contiguous())


def _norm(module: Any) -> Product:
    weight, eps = module.weight, float(module.variance_epsilon)
    shape, dtype = tuple(weight.shape), weight.dtype
    if dtype is torch.float32:
        return lambda x: rms_norm(x, shape, weight, eps)
    # The family rounds before it multiplies by the weight; torch's function after.
    return lambda x: rms_norm(x.float(), shape, None, eps).to(dtype).mul_(weight)
