"""Tokens that the servers chose, and the rows that they continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from bloombee.client.payloads import ids_bytes
from bloombee.models.scores import has_penalties, later
from bloombee.protocol.messages import End, Sampling

Finished = End


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of row `row` of the prompts; `finished` says whether and why it is the last.

    `logprob` is None unless `Sampling.logprobs` asked for it; `alternatives` are the
    likeliest ids with theirs.
    """

    row: int
    id: int
    finished: Finished = ""
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


Emit = Callable[[Sequence[Token]], None]
"""Takes tokens as they come, in the client's loop; must not wait."""


@dataclass(slots=True, eq=False)
class Line:
    """The caller's row `row`, which lies in `sequence`: how its tokens are chosen, and which were.

    `sampling` is that of the first token.
    """

    row: int
    sequence: int
    sampling: Sampling
    chosen: list[int] = field(default_factory=list)
    finished: Finished = ""

    @property
    def left(self) -> int:
        """How many tokens may follow."""
        return self.sampling.budget - len(self.chosen)

    def now(self) -> Sampling:
        """How the next token is chosen."""
        return later(self.sampling, self.chosen)

    def take(self, token: Token) -> None:
        """Continue with `token`."""
        self.chosen.append(token.id)
        self.finished = token.finished


def with_context(sampling: Sampling, prompt: Sequence[int]) -> Sampling:
    """The sampling of the first token after `prompt`, which penalties look at."""
    if sampling.context or not has_penalties(sampling):
        return sampling
    return replace(sampling, context=ids_bytes(prompt))
