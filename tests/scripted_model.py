"""A model without servers: what it answers, and when, is up to the test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bloombee.client.decoding import Token
from bloombee.client.loop import LoopThread
from bloombee.client.many import ManyPromptsMixin
from bloombee.client.prompts import Limits, Words
from bloombee.errors import KVFull

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from bloombee.protocol.messages import Sampling

MAX_LENGTH = 1000
VOCABULARY = 256


class ByteTokenizer:
    """One token a byte; a chat is its messages' contents, one after the other."""

    chat_template = "yes"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Any, **_: object) -> dict[str, list[int]]:
        if any(message["role"] == "nobody" for message in messages):
            raise ValueError("no such role")
        return self("".join(message["content"] for message in messages))


def echo(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Answers with the prompt; what another stream draws is in capitals."""
    text = bytes(prompt)
    return list(text.upper() if sampling.stream else text)


@dataclass
class ScriptedModel(ManyPromptsMixin):
    """Tokens of `reply`, one a turn of the loop, for as many rows as there is `room`.

    `failures` are raised, by the first id of a prompt, after its first token.
    """

    reply: Callable[[Sequence[int], Sampling], list[int]] = echo
    room: int = 1000
    pause_s: float = 0.0
    patience: float = 0.0
    failures: dict[int, Exception] = field(default_factory=dict)
    thread: LoopThread = field(default_factory=LoopThread)

    def __post_init__(self) -> None:
        self.open = 0
        self.most_open = 0
        self.opened = 0
        self.source: Any = SimpleNamespace(name="scripted")
        self.asked: list[tuple[Sampling, ...]] = []
        self.in_background: list[bool] = []

    @property
    def loop(self) -> LoopThread:
        return self.thread

    @property
    def patience_s(self) -> float:
        return self.patience

    @property
    def words(self) -> Words:
        tokenizer: Any = ByteTokenizer()
        return Words(tokenizer)

    @property
    def limits(self) -> Limits:
        return Limits("scripted", MAX_LENGTH, VOCABULARY, (0,))

    async def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> AsyncGenerator[Token, None]:
        if self.open + len(prompts) > self.room:
            await asyncio.sleep(0)
            raise KVFull(f"{self.room - self.open} rows free, {len(prompts)} asked for")
        self.opened += 1
        self.open += len(prompts)
        self.most_open = max(self.most_open, self.open)
        self.asked.append(tuple(sampling))
        self.in_background.append(background)
        try:
            replies = [self.reply(p, s) for p, s in zip(prompts, sampling, strict=True)]
            for number in range(max(map(len, replies))):
                await asyncio.sleep(self.pause_s)
                for row, reply in enumerate(replies):
                    if number < len(reply):
                        budget = sampling[row].budget
                        ends = "stop" if number == len(reply) - 1 else ""
                        ends = "length" if number == budget - 1 else ends
                        if number < budget:
                            yield Token(row, reply[number], ends, -0.5)
                if (error := self.failures.get(prompts[0][0])) is not None:
                    raise error
        finally:
            self.open -= len(prompts)

    def close(self) -> None:
        self.thread.close()
