"""Prompts as callers give them, and as servers take them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from bloombee.client.parameters import SamplingParams
from bloombee.client.text import piece_bytes
from bloombee.errors import ModelError, RequestError
from bloombee.protocol.messages import Sampling

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | torch.Tensor
"""A text to go on from, its token ids, or the messages of a chat to answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is answered. `key` comes back with the answer."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    key: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """A request as servers take it: the ids, and a sampling for each answer to them."""

    index: int
    request: Request
    ids: tuple[int, ...]
    sampling: tuple[Sampling, ...]


class Words:
    """The tokenizer of a model; for several threads. Without one there is no text, only ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers refuse a second thread meanwhile

    @property
    def exist(self) -> bool:
        """Whether the model has a tokenizer."""
        return self._tokenizer is not None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt. Raises RequestError or ModelError."""
        if isinstance(prompt, torch.Tensor):
            return _of_tensor(prompt)
        if isinstance(prompt, str):
            with self._lock:
                encoded: Any = self._needed()(prompt)
            return tuple(encoded["input_ids"])
        if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
            raise RequestError(
                f"a prompt is a text, token ids or messages, not a {type(prompt).__name__}"
            )
        if prompt and isinstance(prompt[0], Mapping):
            return self._of_messages(prompt)
        ids = [_as_id(entry) for entry in prompt]
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; empty without a tokenizer."""
        if self._tokenizer is None or not ids:
            return ""
        with self._lock:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return str(text)

    def show(self, token: int) -> str:
        """The text of a single token, special ones too."""
        if self._tokenizer is None:
            return ""
        with self._lock:
            return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def spell(self, token: int) -> bytes:
        """The bytes of a single token, which may be a part of a character."""
        text = self.show(token)
        if self._tokenizer is None or "\ufffd" not in text:
            return text.encode()
        return piece_bytes(str(self._tokenizer.convert_ids_to_tokens(token))) or text.encode()

    def _needed(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ModelError("the model has no tokenizer: give prompts as token ids")
        return self._tokenizer

    def _of_messages(self, messages: Sequence[Any]) -> tuple[int, ...]:
        tokenizer = self._needed()
        if not tokenizer.chat_template:
            raise RequestError("the model has no chat template: give prompts as text")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise RequestError(f"messages[{number}]: a message has a role and a content")
        try:
            with self._lock:
                encoded: Any = tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    add_generation_prompt=True,
                    return_dict=True,
                )
        except Exception as error:  # noqa: BLE001 - whatever a template, which is a program, raises
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        return tuple(encoded["input_ids"])


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model takes."""

    name: str
    max_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def prepare(index: int, request: Request, words: Words, limits: Limits) -> Job:
    """Make `request` ready to send. Raises RequestError or ModelError for what can't be."""
    params = request.params
    if params.stop_strings and not words.exist:
        raise RequestError("stop texts need a tokenizer, which the model lacks: use stop_ids")
    ids = words.encode(request.prompt)
    if not ids:
        raise RequestError("the prompt is empty: give it at least one token")
    out = [token for token in ids if not 0 <= token < limits.vocab_size]
    if out:
        raise RequestError(f"token id {out[0]} is not one of the model's {limits.vocab_size}")
    if len(ids) + params.max_new_tokens > limits.max_length:
        raise RequestError(
            f"{len(ids)} tokens and up to {params.max_new_tokens} new ones are more than "
            f"{limits.name} takes ({limits.max_length}): shorten the prompt or max_new_tokens"
        )
    return Job(index, request, ids, params.sampling(limits.eos_ids))


def _of_tensor(prompt: torch.Tensor) -> tuple[int, ...]:
    row = prompt[0] if prompt.dim() == 2 and len(prompt) == 1 else prompt
    if row.dim() != 1 or row.is_floating_point():
        raise RequestError(
            f"a prompt of ids is one row of integers, not {list(prompt.shape)} of {prompt.dtype}: "
            "give each row of a batch by itself"
        )
    return tuple(row.tolist())


def _as_id(entry: object) -> int:
    if type(entry) is not int:
        raise RequestError(f"a prompt of ids holds {entry!r}, which is no token id")
    return entry
