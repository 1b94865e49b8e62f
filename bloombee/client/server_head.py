"""What a call of `generate` is for the server head: its rows, and its output as transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, Shaped
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from bloombee.client.batch import RemoteBatch
from bloombee.client.choosing import Seeding, samplings, unsupported
from bloombee.client.inputs import check_ids, read_inputs
from bloombee.client.micro_batches import Strand
from bloombee.client.packing import Packing
from bloombee.client.tokens import Token

_KNOWN = ("attention_mask", "cache", "use_cache", "logits_to_keep", "tokenizer")


@dataclass(frozen=True, slots=True)
class Request:
    """The new columns of a call, as rows of ids, and how tokens are chosen after them."""

    strand: Strand
    packing: Packing
    mask: Shaped[torch.Tensor, "B S"] | None


@dataclass(frozen=True, slots=True)
class Arguments:
    """What transformers calls `_sample` with."""

    input_ids: Int[torch.Tensor, "B C"]
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]

    def check(self, seed: int | None) -> None:
        """Raise Unsupported for what only the client head does."""
        config = self.config
        told = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        for name in (*told, "is_assistant", "prefill_chunk_size"):
            if getattr(config, name, None):
                raise unsupported(name)
        if config.use_cache is False:
            raise unsupported("use_cache=False")
        if config.do_sample and seed is None:
            raise unsupported("sampling without seed=")
        others = [k for k, v in self.model_kwargs.items() if v is not None and k not in _KNOWN]
        if others or not self.input_ids.shape[1]:
            raise unsupported(", ".join(others) or "prompts without ids")

    def request(self, held: RemoteBatch | None, seed: int | None, vocabulary: int) -> Request:
        """What is new after what `held` holds.

        Raises Unsupported for what only the client head does, RequestError for what can't be.
        """
        self.check(seed)
        ids, mask = self.input_ids.cpu(), self.model_kwargs.get("attention_mask")
        past = 0 if held is None else held.columns
        if held is not None and mask is not None and mask.shape[1] != ids.shape[1]:
            raise unsupported("a cache with input_ids that leave out what it holds")
        chosen = samplings(
            ids,
            self.logits_processor,
            self.stopping_criteria,
            Seeding(seed if self.config.do_sample else None),
        )
        inputs = read_inputs(ids[:, past:], None, None if mask is None else mask.cpu(), held)
        packing = inputs.packing()
        if min(packing.counts) < 1:
            raise unsupported("a row without new tokens")
        tokens = inputs.tokens(packing)
        check_ids(tokens, vocabulary)
        repeats = max(1, self.config.num_return_sequences or 1)
        repeats = repeats if held is None and inputs.repeats(repeats) else 1
        packed = [] if tokens.ids is None else tokens.ids.split(list(packing.counts))
        new = tuple(row.tolist() for row in packed)
        return Request(Strand(0, new, tuple(chosen), repeats), packing, inputs.mask)

    def answers(self, streamer: Any) -> Answers:
        """An empty answer, which `streamer`, if any, is to be told of."""
        ends = any(hasattr(each, "eos_token_id") for each in self.stopping_criteria)
        pad = getattr(self.config, "_pad_token_tensor", None) if ends else None
        return Answers(self.input_ids, 0 if pad is None else int(pad), streamer)

    def result(self, sequences: Int[torch.Tensor, "B N"]) -> Any:
        """What the call returns: the ids, with the cache to go on from if it asks for both."""
        if not self.config.return_dict_in_generate:
            return sequences
        output: Any = GenerateDecoderOnlyOutput(sequences=sequences)  # pyright: ignore[reportArgumentType] - transformers asks for torch's older name
        output.cache = self.model_kwargs.get("cache")
        return output


class Answers:
    """The tokens of all rows, in columns: rows that finished early are padded."""

    def __init__(self, input_ids: Int[torch.Tensor, "B C"], pad: int, streamer: Any) -> None:
        self._input_ids = input_ids
        self._pad = pad
        self._streamer = streamer
        self._rows: list[list[int]] = [[] for _ in range(len(input_ids))]
        self._going = set(range(len(input_ids)))
        self._told = 0

    def take(self, tokens: Sequence[Token]) -> None:
        """Enter tokens; the streamer gets each column once all rows have come so far."""
        for token in tokens:
            self._rows[token.row].append(token.id)
            if token.finished:
                self._going.discard(token.row)
        if self._streamer is None:
            return
        complete = min((len(self._rows[row]) for row in self._going), default=self.columns)
        for column in range(self._told, complete):
            self._streamer.put(torch.tensor(self._column(column)))
        self._told = max(self._told, complete)

    @property
    def columns(self) -> int:
        """How many tokens the longest row has."""
        return max(map(len, self._rows))

    def _column(self, column: int) -> list[int]:
        return [row[column] if column < len(row) else self._pad for row in self._rows]

    def finish(self) -> Int[torch.Tensor, "B N"]:
        """Prompts and tokens of all rows; the streamer is told that it is over."""
        if self._streamer is not None:
            self._streamer.end()
        columns = [self._column(column) for column in range(self.columns)]
        new = torch.tensor(columns, dtype=self._input_ids.dtype, device=self._input_ids.device)
        return torch.cat((self._input_ids, new.T), dim=1)
