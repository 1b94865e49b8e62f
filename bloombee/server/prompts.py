"""The prompts that a session announced when it opened, and how far each has come. Pure.

A stage only sees rows: that a sequence holds what its chain says, it takes from its client.
It holds for the tokens that the first step of each sequence brings behind what was
adopted, as far as nothing was cut or copied over since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloombee.protocol.messages import PREFIX_TOKENS, Operations, Step


@dataclass(slots=True, eq=False)
class Prompt:
    """One sequence's chunks by `keys`.

    Up to `computed` tokens of it are there, up to `sure` they are what the chain says.
    The first `looked` chunks are kept, or about to be, or not, for good. `begun`: its first
    step came.
    """

    keys: tuple[bytes, ...]
    sure: int = 0
    computed: int = 0
    looked: int = 0
    begun: bool = False

    def __post_init__(self) -> None:
        self.sure = len(self.keys) * PREFIX_TOKENS

    @property
    def ready(self) -> int:
        """How many more chunks could be kept now."""
        return max(0, min(self.computed, self.sure) // PREFIX_TOKENS - self.looked)

    @property
    def is_over(self) -> bool:
        """Whether no other chunk ever can be kept."""
        return (self.looked + 1) * PREFIX_TOKENS > self.sure


class Prompts:
    """Those of all sequences of one session, in the epoch in which it was opened."""

    def __init__(self, keys: Sequence[Sequence[bytes]]) -> None:
        self.each = [Prompt(tuple(own)) for own in keys]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do for any of them."""
        return all(prompt.is_over for prompt in self.each)

    def taken(self, step: Step) -> list[int]:
        """A new step was taken; returns how much was adopted of each sequence that it begins."""
        begun = {sequence for sequence, prompt in enumerate(self.each) if prompt.begun}
        adopted: list[int] = []
        for sequence, first in zip(step.sequences, step.first_positions, strict=True):
            prompt = self.each[sequence]
            if not prompt.begun:
                prompt.begun, prompt.computed = True, first
                adopted.append(first)
        self._operate(step.operations, begun)
        return adopted

    def _operate(self, operations: Operations, begun: set[int]) -> None:
        for destination, _ in operations.forks:
            self.each[destination].sure = 0
        for sequence in operations.releases:
            self.each[sequence].sure = 0
        for sequence, length in operations.truncates:
            if sequence in begun:  # else it says how much was adopted
                self.each[sequence].sure = min(self.each[sequence].sure, length)

    def computed(self, step: Step) -> None:
        """That step is computed."""
        rows = zip(step.sequences, step.first_positions, step.counts, strict=True)
        for sequence, first, count in rows:
            prompt = self.each[sequence]
            if prompt.computed == first:
                prompt.computed += count

    def ready(self) -> tuple[int, Prompt] | None:
        """A sequence of which another chunk can be kept now."""
        for sequence, prompt in enumerate(self.each):
            if prompt.ready:
                return sequence, prompt
        return None
