"""A span of blocks that runs on packed tokens, with the ends of the model that adjoin it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import linear

from bloombee.core import Span
from bloombee.errors import Unsupported
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.models.attention import PackedStep
from bloombee.models.block import Block, BlockStep, TransformersBlock
from bloombee.models.ends import End, ModelEnds, ends_of
from bloombee.models.gated_block import GatedBlock
from bloombee.models.linear import Floors, InvariantLinear, Product, make_invariant
from bloombee.models.rotary import Rotary
from bloombee.models.source import ModelSource
from bloombee.models.spec import FamilySpec
from bloombee.models.weights import fill


class SpanModel:
    """Blocks `[start, end)` of one model, weights loaded, ready to run steps.

    It may hold embeddings, final norm and head as well: see `load_with_ends`.
    """

    def __init__(
        self,
        source: ModelSource,
        span: Span,
        blocks: Sequence[Block],
        rotary: Rotary | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.span = span
        self.hidden_size = source.hidden_size
        self.vocab_size = source.vocab_size
        self.dtype, self.device = dtype, torch.device(device)
        self._blocks = blocks
        self._rotary = rotary
        self._ends: ModelEnds | None = None
        self._held = frozenset[End]()

    @classmethod
    def load(
        cls,
        source: ModelSource,
        span: Span,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: bool = True,
        plain: bool = False,
    ) -> Self:
        """Read the span's tensors, and nothing else, into new layers.

        `plain` keeps transformers' layers where there are faster ones of ours. Raises
        ModelError for blocks the model lacks and tensors the checkpoint lacks.
        """
        source.check_span(span)
        outline = source.outline()
        path = source.spec.parts.blocks
        paths = [f"{path}.{index}" for index in range(span.start, span.end)]
        layers = {path: outline.get_submodule(path) for path in paths}
        fill(source, layers, dtype=dtype, device=device, progress=progress)
        rotary = _rotary(source, outline, device)
        spec = source.spec.model_copy(update={"gated": None}) if plain else source.spec
        del outline
        invariant = torch.device(device).type == "cpu"
        floors: Floors = {}
        blocks = [
            _block(layers.pop(path), spec, floors=floors if invariant else None) for path in paths
        ]
        return cls(source, span, blocks, rotary, dtype=dtype, device=device)

    @classmethod
    def load_with_ends(
        cls,
        source: ModelSource,
        span: Span,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: bool = True,
    ) -> Self:
        """As `load`, and what adjoins the span: embeddings at block 0, norm and head at the last.

        Raises ModelError as well for tensors of theirs.
        """
        model = cls.load(source, span, dtype=dtype, device=device, progress=progress)
        held = ends_of(span, source.num_blocks)
        if held:
            model._held = held
            model._ends = ModelEnds.load(
                source, dtype=dtype, device=device, ends=held, progress=progress
            )
        return model

    def embed(
        self, ids: Int[torch.Tensor, "T"], positions: Int[torch.Tensor, "T"]
    ) -> Float[torch.Tensor, "T D"]:
        """Rows that enter block 0. Raises Unsupported where the embeddings aren't held."""
        return self._end("first").embed(ids, positions)

    def logits(self, rows: Float[torch.Tensor, "R D"]) -> Float[torch.Tensor, "R V"]:
        """Float32 scores for rows that left the last block.

        Raises Unsupported where the head isn't held.
        """
        ends = self._end("last")
        return ends.logits(ends.norm(rows)).float()

    def _end(self, end: End) -> ModelEnds:
        if self._ends is None or end not in self._held:
            part = "embeddings" if end == "first" else "final norm and head"
            raise Unsupported(f"blocks {self.span} were loaded without the {part} of the model")
        return self._ends

    def forward(
        self,
        rows: Float[torch.Tensor, "T D"],
        batch: Sequence[BatchItem],
        pool: KVPool,
        span: Span | None = None,
    ) -> Float[torch.Tensor, "T D"]:
        """Run the blocks on the packed tokens of `batch`; returns rows for the next span.

        `span` is a part of the blocks held (default: all of them).

        Writes K and V of the new tokens into `pool`. When anything fails, the pool is as
        before and the error passes through (RequestError when `batch` does not fit it).
        """
        plan = pool.begin(batch)
        try:
            step = self._step(rows, batch, PackedStep(pool, plan))
            for block in self._blocks_of(span or self.span):
                rows = block(rows, step)
        except BaseException:
            pool.abort(plan)
            raise
        pool.finish(plan)
        return rows

    def _blocks_of(self, span: Span) -> Sequence[Block]:
        first = self.span.start
        return self._blocks[span.start - first : span.end - first]

    def _step(
        self, rows: torch.Tensor, batch: Sequence[BatchItem], packed: PackedStep
    ) -> BlockStep:
        tables = [item.table for item in batch]
        parts = [table.positions for table in tables]
        positions = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
        positions = positions.to(self.device)
        if self._rotary is None:
            return BlockStep(packed, positions, None)
        counts = [count for table in tables for count in table.counts]
        return BlockStep(packed, positions, self._rotary(rows, positions, counts))


def _block(layer: nn.Module, spec: FamilySpec, *, floors: Floors | None) -> Block:
    """The block that runs `layer`; `floors` asks for products that do not depend on rows."""
    if spec.gated is not None:
        return GatedBlock(layer, spec.gated, partial(_product, floors=floors))
    if floors is not None:
        make_invariant(layer, floors)
    return TransformersBlock(layer, spec.layer_arguments)


def _product(plain: nn.Linear, *, floors: Floors | None) -> Product:
    if floors is None:
        return partial(linear, weight=plain.weight, bias=plain.bias)
    return InvariantLinear(plain, floors).forward


def _rotary(source: ModelSource, outline: nn.Module, device: torch.device | str) -> Rotary | None:
    path = source.spec.parts.rotary
    if path is None:
        return None
    # Its frequencies are no weights: a new one computes them from the config.
    module = type(outline.get_submodule(path))(config=source.config)
    return Rotary(module.to(device), source.config)
