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

Interactive work comes before background work (batch jobs): among prompts, and among the
rest where not all of it fits. Prompts and the rest take turns whichever they are, and
what runs is never stopped but at the end of a chunk. So interactive work runs as it would
without background work of its kind and span, but for a reserve: of `RESERVE_EVERY` passes
after which the background item that waits longest would still wait, one begins with it.

Nobody starves. Spans take turns; on a span prompts and the rest take turns; among equals
decode steps run in order of arrival, as many as fit, the first in any case, and the
prompt of the client that had the fewest such prompt tokens computed comes first (a client
that comes back after a pause does not catch up). The reserve is against interactive work
only: where none waits, it is no way round the fairness between clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bloombee.core import PeerId, Phase, SessionId, Span

NOBODY = PeerId("")

DECODING_PASSES = 8
"""So many passes after the last that was not of prompts, a token may be on its way back."""
RESERVE_EVERY = 4
"""Of so many passes of a kind that interactive work could fill, background work gets one."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One step that waits, `tokens` of it not computed yet.

    `touches` are the sequences that it reads or writes, those of its operations
    included. `arrival` orders items; an item that ran in part keeps its place. In the
    `background` it gives way to others.
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
    background: bool = False

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
class _Reserve:
    """How often background work has given way, on one span to work of its own kind."""

    missed: int = 0

    def shares(self, items: Sequence[WorkItem], limit: int, rows: int | None = None) -> list[Share]:
        """Those of one pass, of `items` in their order unless it is the reserve's turn."""
        shares = _fill(_few(items, rows), limit)
        background = [item for item in items if item.background]
        if not background or items[0].background:
            return shares
        oldest = min(background, key=lambda item: item.arrival)
        if Share(oldest, oldest.tokens) in shares:
            self.missed = 0
        elif self.missed + 1 < RESERVE_EVERY:
            self.missed += 1
        else:
            self.missed = 0
            others = [item for item in items if item is not oldest]
            shares = _fill(_few([oldest, *others], rows), limit)
        return shares


@dataclass(slots=True)
class _Turn:
    """When a span ran last (0: never), and what."""

    at: int = 0
    ran_prompts: bool = True
    prompts: _Reserve = field(default_factory=_Reserve)
    rest: _Reserve = field(default_factory=_Reserve)


@dataclass(slots=True)
class _Service:
    """Prompt tokens computed for each client that has any waiting; newcomers start level.

    Of one urgency: what a client's batch job got is not held against its questions.
    """

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
        self._interactive = _Service()
        self._background = _Service()

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
        self._update_services(queue)
        if prompts and (not rest or not turn.ran_prompts):
            decoding = self._passes - self._rest_ran < DECODING_PASSES
            limit = self._budget.chunk_tokens if rest or decoding else self._budget.tokens
            shares = turn.prompts.shares(self._ordered(prompts), limit)
            for share in shares:
                self._service(share.item).tokens[share.item.client] += share.tokens
        else:
            urgent_first = sorted(rest, key=lambda item: item.background)
            shares = turn.rest.shares(urgent_first, self._budget.tokens, self._decode_rows)
            self._rest_ran = self._passes
        self._passes += 1
        turn.at, turn.ran_prompts = self._passes, shares[0].item.is_prompt
        return tuple(shares)

    def _service(self, item: WorkItem) -> _Service:
        return self._background if item.background else self._interactive

    def _update_services(self, queue: Sequence[WorkItem]) -> None:
        prompts = [item for item in queue if item.is_prompt]
        for service in (self._interactive, self._background):
            service.update(item.client for item in prompts if self._service(item) is service)

    def _ordered(self, prompts: Sequence[WorkItem]) -> list[WorkItem]:
        """Interactive ones first; of each urgency as clients' service has it."""
        urgent = [item for item in prompts if not item.background]
        others = [item for item in prompts if item.background]
        return self._interactive.order(urgent) + self._background.order(others)

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
