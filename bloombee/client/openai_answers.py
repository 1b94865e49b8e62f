"""Answers in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from bloombee.client.completions import Choice, Completion, ScoredToken, Usage
from bloombee.client.prompts import Words


class UsageForm(msgspec.Struct, frozen=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Scored(msgspec.Struct, frozen=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredAmong(Scored, frozen=True):
    """The same, with the likeliest in its place."""

    top_logprobs: list[Scored]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of all tokens of an answer."""

    content: list[ScoredAmong]


class TextLogprobs(msgspec.Struct, frozen=True):
    """The same in the form of completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatAnswer(msgspec.Struct, frozen=True):
    """What the assistant says."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer to a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str


class TextChoice(msgspec.Struct, frozen=True):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer to a chat completion request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageForm
    object: Literal["chat.completion"] = "chat.completion"


class TextCompletion(msgspec.Struct, frozen=True):
    """The answer to a completion request."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageForm
    object: Literal["text_completion"] = "text_completion"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an answer is marked with: its id, the time in seconds since 1970, the model."""

    id: str
    created_s: int
    model: str


def chat_completion(found: Completion, words: Words, stamp: Stamp) -> ChatCompletion:
    """The answer to a chat. Raises the error of `found`, if there is one."""
    choices = [
        ChatChoice(number, ChatAnswer(each.text), _chat_logprobs(each, words), each.finish_reason)
        for number, each in enumerate(_choices(found))
    ]
    name = f"chatcmpl-{stamp.id}"
    return ChatCompletion(name, stamp.created_s, stamp.model, choices, usage_form(found.usage))


def text_completion(found: Completion, words: Words, stamp: Stamp) -> TextCompletion:
    """The answer to a prompt. Raises the error of `found`, if there is one."""
    choices = [
        TextChoice(number, each.text, _text_logprobs(each, words), each.finish_reason)
        for number, each in enumerate(_choices(found))
    ]
    name = f"cmpl-{stamp.id}"
    return TextCompletion(name, stamp.created_s, stamp.model, choices, usage_form(found.usage))


def usage_form(usage: Usage) -> UsageForm:
    """Tokens read and written, in OpenAI's words."""
    return UsageForm(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def _choices(found: Completion) -> tuple[Choice, ...]:
    if found.error is not None:
        raise found.error
    return found.choices


def _scored(choice: Choice) -> list[tuple[ScoredToken, float]]:
    return [(token, token.logprob) for token in choice.tokens if token.logprob is not None]


def _chat_logprobs(choice: Choice, words: Words) -> ChatLogprobs | None:
    scored = _scored(choice)
    if not scored:
        return None
    return ChatLogprobs(
        [
            ScoredAmong(*_token(token.id, logprob, words), _tokens(token.alternatives, words))
            for token, logprob in scored
        ]
    )


def _tokens(alternatives: Iterable[tuple[int, float]], words: Words) -> list[Scored]:
    return [Scored(*_token(id_, logprob, words)) for id_, logprob in alternatives]


def _token(id_: int, logprob: float, words: Words) -> tuple[str, float, list[int]]:
    return words.show(id_), logprob, list(words.spell(id_))


def _text_logprobs(choice: Choice, words: Words) -> TextLogprobs | None:
    scored = _scored(choice)
    if not scored:
        return None
    texts = [words.show(token.id) for token, _ in scored]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    tops = [{words.show(i): score for i, score in token.alternatives} for token, _ in scored]
    return TextLogprobs(texts, [logprob for _, logprob in scored], tops, offsets)
