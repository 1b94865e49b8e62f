"""Answers to prompts: as they come, token by token, and whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from bloombee.client.decoding import Decodes, Finished, Token
from bloombee.client.parameters import SamplingParams
from bloombee.client.prompts import Job, Request, Words
from bloombee.client.text import Detokenizer, StopStrings
from bloombee.errors import BloomBeeError, StepFailed

FinishReason = Finished


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written; those of all `n` answers to a prompt."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its log-probability, and the likeliest tokens in its place, if asked for."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to answer number `choice`; the last has a `finish_reason`.

    `text` may be empty: half a character waits for the rest of it, and what may be the
    beginning of a stop string for what follows. `usage` counts up to this token.
    """

    choice: int
    token: ScoredToken
    text: str
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `tokens` hold all that were generated, the stopping one too."""

    text: str
    tokens: tuple[ScoredToken, ...]
    finish_reason: FinishReason

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to a prompt, or the error it failed with; `index` is the prompt's number."""

    index: int
    request: Request
    choices: tuple[Choice, ...]
    usage: Usage
    error: BloomBeeError | None = None

    @property
    def text(self) -> str:
        """The first answer. Raises the error, if there is one."""
        return self.first.text

    @property
    def ids(self) -> list[int]:
        """Token ids of the first answer. Raises the error, if there is one."""
        return self.first.ids

    @property
    def first(self) -> Choice:
        """The first answer. Raises the error, if there is one."""
        if self.error is not None:
            raise self.error
        return self.choices[0]

    @property
    def key(self) -> Any:
        """What the request is known by to whoever made it."""
        return self.request.key


def failure(index: int, request: Request, error: BloomBeeError) -> Completion:
    """The result of a prompt that has none."""
    return Completion(index, request, (), Usage(0, 0), error)


class _Answer:
    """One answer as it grows."""

    def __init__(self, params: SamplingParams, words: Words) -> None:
        self._text = Detokenizer(words.decode)
        self._stops = StopStrings(params.stop_strings)
        self.finish_reason: FinishReason = ""

    def take(self, token: Token) -> str:
        """The text that `token` adds; sets `finish_reason` with the last."""
        text = self._stops.push(self._text.push(token.id))
        if token.finished and not self._stops.hit:
            text += self._stops.push(self._text.flush())
            if not self._stops.hit:
                text += self._stops.flush()
        self.finish_reason = "stop" if self._stops.hit else token.finished
        return text


async def answer(
    source: Decodes,
    job: Job,
    words: Words,
    deadline_s: float | None,
    *,
    background: bool = False,
) -> AsyncGenerator[Delta, None]:
    """All answers to a prompt, token by token; servers hold nothing of it afterwards.

    Raises what `source.decode` raises, StepFailed when it ends before all answers do.
    """
    answers = [_Answer(job.request.params, words) for _ in job.sampling]
    unfinished, count = len(answers), 0
    prompts = [job.ids] * len(answers)
    decoding = source.decode(prompts, job.sampling, deadline_s=deadline_s, background=background)
    async with aclosing(decoding) as tokens:
        async for token in tokens:
            mine = answers[token.row]
            if mine.finish_reason:
                continue  # its stop string came, but other answers go on
            text = mine.take(token)
            count += 1
            unfinished -= bool(mine.finish_reason)
            scored = ScoredToken(token.id, token.logprob, token.alternatives)
            yield Delta(token.row, scored, text, mine.finish_reason, Usage(len(job.ids), count))
            if not unfinished:
                return
    raise StepFailed("the servers ended before the answer did: ask again")


async def complete(
    source: Decodes,
    job: Job,
    words: Words,
    deadline_s: float | None,
    on_token: Callable[[], None] = lambda: None,
    *,
    background: bool = False,
) -> Completion:
    """All answers to a prompt, whole. Raises what `answer` raises."""
    texts: list[list[str]] = [[] for _ in job.sampling]
    tokens: list[list[ScoredToken]] = [[] for _ in job.sampling]
    reasons: list[FinishReason] = ["" for _ in job.sampling]
    usage = Usage(len(job.ids), 0)
    coming = answer(source, job, words, deadline_s, background=background)
    async with aclosing(coming) as deltas:
        async for delta in deltas:
            texts[delta.choice].append(delta.text)
            tokens[delta.choice].append(delta.token)
            reasons[delta.choice] = delta.finish_reason
            usage = delta.usage
            on_token()
    choices = tuple(
        Choice("".join(text), tuple(row), reason)
        for text, row, reason in zip(texts, tokens, reasons, strict=True)
    )
    return Completion(job.index, job.request, choices, usage)
