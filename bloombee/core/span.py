"""Spans of blocks, and routes that cover a model with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloombee.core.identifiers import PeerId


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Half-open range `[start, end)` of transformer blocks; never empty.

    Raises ValueError when the bounds are negative, empty or reversed.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.end <= self.start:
            raise ValueError(f"a span needs 0 <= start < end, got {self.start}:{self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self.start <= block < self.end

    def covers(self, other: Span) -> bool:
        """Whether every block of `other` lies in this span."""
        return self.start <= other.start and other.end <= self.end

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `START:END`; raises ValueError with the expected form otherwise."""
        start, separator, end = text.partition(":")
        try:
            if not separator:
                raise ValueError
            bounds = int(start), int(end)
        except ValueError:
            raise ValueError(
                f"blocks are written START:END, for example 0:10, got {text!r}"
            ) from None
        return cls(*bounds)


@dataclass(frozen=True, slots=True)
class Stage:
    """One span of a route: the blocks that `peer` computes for this session."""

    peer: PeerId
    span: Span


@dataclass(frozen=True, slots=True)
class Route:
    """Stages in order whose spans join without gap or overlap.

    Raises ValueError when the spans do not join.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a route needs at least one stage")
        for left, right in zip(self.stages, self.stages[1:], strict=False):
            if left.span.end != right.span.start:
                raise ValueError(f"stages do not join: {left.span} is followed by {right.span}")

    @property
    def span(self) -> Span:
        """The blocks that the whole route covers."""
        return Span(self.stages[0].span.start, self.stages[-1].span.end)

    def __str__(self) -> str:
        return " -> ".join(f"{stage.span} at {stage.peer[-8:]}" for stage in self.stages)
