"""What runs next: a policy over the work that waits, without clock or I/O.

The executor keeps the queue and asks `Scheduler.next_batch` before every forward
pass. The answer is shares: whole items, or the next tokens of a long one. The executor
carries out any answer that keeps these invariants (a plain first-come, first-served
twin lives in the tests):

- the shares hold at most `Budget.tokens`, unless there is one alone that can't be cut;
- of decode and verify steps together at most `decode_rows` sequences, unless there is one
  alone, and none of them is cut for that;
- all shares are on the same span of blocks, and all prompts or all none;
- an item waits for every earlier item that touches one of its sequences.

Decode and verify steps go first, all that wait together: reading the weights is what
they cost, and it costs the same for one row as for many. But a stage that merged all
micro-batches of a pipeline would send them on together, and the next stage would idle
meanwhile and then merge them too: hence `decode_rows`. Prompts are bound by
arithmetic, so a token that shared a pass with one would only wait for it. They run in
passes of their own between the others', and while others decode, in chunks: no token
waits for more than one chunk.

Nobody starves. Spans take turns; on a span prompts and the rest take turns; decode
steps run in order of arrival, as many as fit, the first in any case; the prompt of the
client that had the fewest prompt tokens computed comes first (a client that comes back
after a pause does not catch up).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bloombee.core import PeerId, Phase, SessionId, Span

NOBODY = PeerId("")

DECODING_PASSES = 8
"""So many passes after the last that was not of prompts, a token may be on its way back."""


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
    client: PeerId = NOBODY

    @property
    def is_prompt(self) -> bool:
        """Whether it is computed in passes of prompts."""
        return self.phase is Phase.PREFILL

    @property
    def rows(self) -> int:
        """How many sequences a decode or verify step moves on."""
        return self.tokens if self.phase is Phase.DECODE else len(self.touches)


@dataclass(frozen=True, slots=True)
class Budget:
    """`tokens` of one forward pass; `chunk_tokens` of one with prompts while others decode.

    `decode_rows` are the sequences that one pass of other steps moves on (None: no limit).
    """

    tokens: int
    chunk_tokens: int
    decode_rows: int | None = None

    @classmethod
    def of(cls, tokens: int, chunk_tokens: int) -> Budget:
        """A budget whose chunks are no larger than a pass."""
        return cls(tokens, min(tokens, chunk_tokens))


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` of `item` run in the coming pass."""

    item: WorkItem
    tokens: int

    @property
    def finishes(self) -> bool:
        """Whether the item is done with this share."""
        return self.tokens == self.item.tokens


@dataclass(slots=True)
class _Turn:
    """When a span ran last (0: never), and what."""

    at: int = 0
    ran_prompts: bool = True


@dataclass(slots=True)
class _Service:
    """Prompt tokens computed for each client that has any waiting; newcomers start level."""

    tokens: dict[PeerId, int] = field(default_factory=dict[PeerId, int])

    def update(self, clients: Iterable[PeerId]) -> None:
        """Forget who waits no more, and take in who is new."""
        waiting = set(clients)
        kept = {client: count for client, count in self.tokens.items() if client in waiting}
        level = min(kept.values(), default=0)
        self.tokens = {client: kept.get(client, level) for client in waiting}

    def order(self, prompts: Sequence[WorkItem]) -> list[WorkItem]:
        """Prompts of the clients that had least come first, each client's as they came."""
        return sorted(prompts, key=lambda item: (self.tokens[item.client], item.arrival))


class Scheduler:
    """Chooses the shares of one pass after another. It remembers whose turn it is."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._decode_rows = budget.decode_rows
        self._turns: dict[Span, _Turn] = {}
        self._passes = 0
        self._rest_ran = -DECODING_PASSES
        self._service = _Service()

    def set_decode_rows(self, rows: int | None) -> None:
        """Change `Budget.decode_rows` from the next pass on. Any thread may call it."""
        self._decode_rows = rows

    def next_batch(self, queue: Sequence[WorkItem]) -> tuple[Share, ...]:
        """The shares of the next pass; none only when nothing waits.

        `queue` is in order of arrival.
        """
        if not queue:
            return ()
        ready = _ready(queue)
        span = self._span_of_turn(ready)
        turn = self._turns[span]
        here = [item for item in ready if item.span == span]
        prompts = [item for item in here if item.is_prompt]
        rest = [item for item in here if not item.is_prompt]
        self._service.update(item.client for item in queue if item.is_prompt)
        if prompts and (not rest or not turn.ran_prompts):
            decoding = self._passes - self._rest_ran < DECODING_PASSES
            limit = self._budget.chunk_tokens if rest or decoding else self._budget.tokens
            shares = _fill(self._service.order(prompts), limit)
            for share in shares:
                self._service.tokens[share.item.client] += share.tokens
        else:
            shares = _fill(_few(rest, self._decode_rows), self._budget.tokens)
            self._rest_ran = self._passes
        self._passes += 1
        turn.at, turn.ran_prompts = self._passes, shares[0].item.is_prompt
        return tuple(shares)

    def _span_of_turn(self, ready: Sequence[WorkItem]) -> Span:
        """Of the spans that have work, the one that ran longest ago."""
        spans = {item.span: None for item in ready}
        self._turns = {span: self._turns.get(span, _Turn()) for span in {*self._turns, *spans}}
        return min(spans, key=lambda span: self._turns[span].at)


def _ready(queue: Sequence[WorkItem]) -> list[WorkItem]:
    """The items that wait for no earlier one."""
    ready: list[WorkItem] = []
    claimed: set[tuple[SessionId, int]] = set()
    for item in queue:
        touches = [(item.session, sequence) for sequence in item.touches]
        if claimed.isdisjoint(touches):
            ready.append(item)
        claimed.update(touches)
    return ready


def _few(items: Sequence[WorkItem], rows: int | None) -> Sequence[WorkItem]:
    """Those of `items` that move on so many rows in all, in order; the first in any case."""
    if rows is None:
        return items
    few: list[WorkItem] = []
    left = rows
    for item in items:
        if item.rows <= left or not few:
            few.append(item)
            left -= item.rows
    return few


def _fill(items: Sequence[WorkItem], limit: int) -> list[Share]:
    """As many of `items` as fit, in order; the first goes along whatever its size.

    One that can be cut fills what is left; one that can't is passed over, and comes
    first in a later pass, since those before it leave the queue.
    """
    shares: list[Share] = []
    left = limit
    for item in items:
        if left <= 0:
            break
        if item.tokens <= left:
            tokens = item.tokens
        elif item.divisible:
            tokens = left
        elif not shares:
            tokens = item.tokens
        else:
            continue
        shares.append(Share(item, tokens))
        left -= tokens
    return shares
