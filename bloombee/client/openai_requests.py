"""Requests in OpenAI's form (chat completions and completions), and what they ask for.

What we can't do is refused by its name, never passed over. Beside OpenAI's own fields
there are those that other servers of the form have: `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `stop_token_ids`, `ignore_eos`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError, field_validator

from bloombee.client.parameters import SamplingParams
from bloombee.client.prompts import Request
from bloombee.config.base import Settings
from bloombee.config.validation import explain
from bloombee.errors import RequestError


class _Form(Settings):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextPart(_Form):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Form):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class _Body(_Form):
    """Fields of both kinds of requests."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    stream: Literal[False] | None = None
    # They change nothing of the answer.
    model: str | None = None
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for word in value or {}:
            if not word.isascii() or not word.isdecimal():
                raise ValueError(f"keys are token ids, got {word!r}")
        return value

    @property
    def new_tokens(self) -> int | None:
        """The most tokens to generate."""
        return self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives to tell with each token; None tells nothing."""
        return None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """What is asked for, and `defaults` for the rest. Raises RequestError."""
        stop = self.stop
        bias = self.logit_bias
        given = {
            "max_new_tokens": self.new_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if bias is None else {int(k): v for k, v in bias.items()},
            "stop": tuple(stop) if isinstance(stop, list) else stop,
            "stop_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "logprobs": self.told_logprobs,
            "n": self.n,
        }
        return replace(defaults, **{k: v for k, v in given.items() if v is not None})


class ChatBody(_Body):
    """A request for `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def new_tokens(self) -> int | None:
        """The most tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives to tell with each token; None tells nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_Body):
    """A request for `/v1/completions`, of one prompt."""

    prompt: str | list[int]
    logprobs: int | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives to tell with each token; None tells nothing."""
        return self.logprobs


AnyBody = TypeVar("AnyBody", ChatBody, CompletionBody)


def chat_request(body: Mapping[str, Any], defaults: SamplingParams, key: Any = None) -> Request:
    """What a chat completion request asks for. Raises RequestError."""
    read = _read(ChatBody, body)
    messages = [
        # Templates know no developers, who came to be called so after them.
        {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text}
        for turn in read.messages
    ]
    return Request(messages, read.params(defaults), key)


def completion_request(
    body: Mapping[str, Any], defaults: SamplingParams, key: Any = None
) -> Request:
    """What a completion request asks for. Raises RequestError."""
    read = _read(CompletionBody, body)
    return Request(read.prompt, read.params(defaults), key)


def _read(form: type[AnyBody], body: Mapping[str, Any]) -> AnyBody:
    try:
        # Null is how clients write that they ask for nothing, also of what we don't have.
        return form.model_validate({k: v for k, v in body.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{first['loc'][0]}: not supported here; leave it out") from None
        raise RequestError(explain(error, str)) from None
