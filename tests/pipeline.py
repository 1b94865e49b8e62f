"""A model cut into spans that run one after the other in this process: no swarm, no wire."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from bloombee.core import PackedTable, SessionId, Span
from bloombee.kv import BatchItem, make_pool
from bloombee.models import ModelEnds, SpanModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.models import ModelSource


def even_spans(blocks: int, stages: int) -> list[Span]:
    """`stages` spans of about equal length that cover `blocks`."""
    bounds = [round(blocks * stage / stages) for stage in range(stages + 1)]
    return [Span(start, end) for start, end in itertools.pairwise(bounds)]


class Pipeline:
    """All stages of one model with a pool each; sessions are opened by number."""

    def __init__(
        self, source: ModelSource, stages: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self.ends = ModelEnds.load(source, dtype=dtype, device="cpu")
        spans = even_spans(source.num_blocks, stages)
        self.models = [SpanModel.load(source, span, dtype=dtype, device="cpu") for span in spans]
        longest = min(source.max_length, 2048)
        self.pools = [
            make_pool(source.kv_shape(span, dtype, "cpu"), 64 * 256, max_length=longest)
            for span in spans
        ]
        self._sessions = itertools.count()

    def open(self, sequences: int, max_length: int) -> SessionId:
        session = SessionId(next(self._sessions).to_bytes(16, "big"))
        for pool in self.pools:
            pool.reserve(session, sequences, max_length)
        return session

    def close(self, session: SessionId) -> None:
        for pool in self.pools:
            pool.free(session)

    def truncate(self, session: SessionId, sequence: int, length: int) -> None:
        for pool in self.pools:
            pool.truncate(session, sequence, length)

    @torch.inference_mode()
    def step(self, items: Sequence[BatchItem], ids: Sequence[int]) -> torch.Tensor:
        """Logits `[T, V]` of the packed tokens `ids`."""
        return self.ends.logits(self.last_hidden(items, ids))

    @torch.inference_mode()
    def last_hidden(self, items: Sequence[BatchItem], ids: Sequence[int]) -> torch.Tensor:
        """Last hidden states `[T, N]` of the packed tokens `ids`."""
        positions = [torch.from_numpy(item.table.positions) for item in items]
        rows = self.ends.embed(torch.tensor(ids), torch.cat(positions))
        for model, pool in zip(self.models, self.pools, strict=True):
            rows = model.forward(rows, items, pool)
        return self.ends.norm(rows)

    def prefill(
        self, session: SessionId, prompts: Sequence[Sequence[int]], chunk: int | None = None
    ) -> torch.Tensor:
        """Logits `[T, V]` of all prompt tokens, `chunk` packed tokens a step."""
        sequences = range(len(prompts))
        counts = tuple(len(prompt) for prompt in prompts)
        table = PackedTable(tuple(sequences), (0,) * len(prompts), counts)
        ids = [token for prompt in prompts for token in prompt]
        size = chunk or len(ids)
        parts = [(low, min(low + size, len(ids))) for low in range(0, len(ids), size)]
        return torch.cat(
            [
                self.step([BatchItem(session, table.select(low, high))], ids[low:high])
                for low, high in parts
            ]
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, chunk: int | None = None
    ) -> list[list[int]]:
        """Greedy continuation of each prompt."""
        lengths = [len(prompt) for prompt in prompts]
        session = self.open(len(prompts), max(lengths) + new_tokens)
        last = [total - 1 for total in itertools.accumulate(lengths)]
        tokens = self.prefill(session, prompts, chunk)[last].argmax(-1).tolist()
        outputs = [[token] for token in tokens]
        for done in range(new_tokens - 1):
            firsts = tuple(length + done for length in lengths)
            table = PackedTable(tuple(range(len(prompts))), firsts, (1,) * len(prompts))
            tokens = self.step([BatchItem(session, table)], tokens).argmax(-1).tolist()
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        self.close(session)
        return outputs
