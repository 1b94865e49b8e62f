"""What runs next: a pure policy over the work that waits.

The executor keeps the queue and asks `next_batch` before every forward pass. A
policy answers with shares: whole items, or the next tokens of a long one. The
executor carries out any answer that keeps these invariants, so a new policy
(decode first, prefill in the gaps) is another function and nothing else:

- the shares hold at most `budget.tokens`, unless the first is a draft tree, which is never cut;
- one share a session, and all shares on the same span of blocks;
- an item waits for every earlier item that touches one of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloombee.core import Phase, SessionId, Span


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One step that waits, `tokens` of it not computed yet.

    `touches` are the sequences that it reads or writes, those of its operations
    included. `arrival` orders items; an item that ran in part keeps its place.
    """

    arrival: int
    session: SessionId
    step: int
    phase: Phase
    span: Span
    tokens: int
    touches: frozenset[int]
    divisible: bool = True


@dataclass(frozen=True, slots=True)
class Budget:
    """`tokens` of one forward pass, over all its shares."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` of `item` run in the coming pass."""

    item: WorkItem
    tokens: int

    @property
    def finishes(self) -> bool:
        """Whether the item is done with this share."""
        return self.tokens == self.item.tokens


def next_batch(queue: Sequence[WorkItem], budget: Budget) -> tuple[Share, ...]:
    """First come, first served; what waits behind the first and fits goes along.

    `queue` is in order of arrival. Prefill is bound by arithmetic and the other
    phases by reading weights, so the two don't share a pass: a token that waits
    for someone's prompt gains nothing from it. Only the first share is cut.
    """
    if not queue:
        return ()
    first = queue[0]
    shares = [Share(first, min(first.tokens, budget.tokens) if first.divisible else first.tokens)]
    left = budget.tokens - shares[0].tokens
    taken = {first.session}
    passed_over: set[tuple[SessionId, int]] = set()
    for item in queue[1:]:
        if left <= 0:
            break
        fits = (
            item.tokens <= left
            and item.session not in taken
            and _merges(item, first)
            and not any((item.session, sequence) in passed_over for sequence in item.touches)
        )
        if fits:
            shares.append(Share(item, item.tokens))
            left -= item.tokens
            taken.add(item.session)
        else:
            passed_over.update((item.session, sequence) for sequence in item.touches)
    return tuple(shares)


def _merges(item: WorkItem, first: WorkItem) -> bool:
    same_kind = (item.phase is Phase.PREFILL) == (first.phase is Phase.PREFILL)
    return same_kind and item.span == first.span
