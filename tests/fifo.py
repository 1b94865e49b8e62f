"""The plain twin of the scheduler: one item after another, each whole, as they came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bloombee.server.scheduler import Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.server.scheduler import Budget, WorkItem


class Fifo:
    """First come, first served, one a pass; only a long item is cut, to the budget's tokens.

    One alone is never too many `decode_rows`.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def next_batch(self, queue: Sequence[WorkItem]) -> tuple[Share, ...]:
        """The next share of the item that came first."""
        if not queue:
            return ()
        first = queue[0]
        tokens = min(first.tokens, self._budget.tokens) if first.divisible else first.tokens
        return (Share(first, tokens),)
