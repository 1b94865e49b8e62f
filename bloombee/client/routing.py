"""Which servers compute a session: a pure choice over the records of a swarm.

Here it is decided who can be asked at all, and what is said when they don't suffice. Of
those who can, the route of least cost wins (`planner.routing`): what is known of servers and
links decides, and what is not known is taken to be usual, so that each stage is first of all
one more hop. Among routes that cost nearly the same the injected random numbers decide, so
that clients spread over them. A server may be asked for a part of its span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bloombee.core import PeerId, Route, Span
from bloombee.errors import RequestError, SwarmError
from bloombee.planner.hearsay import NOTHING, Knowledge
from bloombee.planner.route_costs import Errand
from bloombee.planner.routing import find_route, spread_factors
from bloombee.planner.workload import Objective

USUAL_PROMPT_TOKENS = 128
MOST_NEW_TOKENS = 256
"""More is seldom generated, however long a session may grow."""


@runtime_checkable
class Offer(Protocol):
    """What routing reads of a server's record."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def span(self) -> Span: ...
    @property
    def state(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def throughput_tokens_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Demand:
    """What a session asks of every stage: `sequences` x `max_length` tokens of KV.

    `part` are the blocks to cover, None for all of the model. The longest prompt has
    `prompt_tokens` (0: unknown), a row on the wire `row_bytes`. With `server_head` tokens go
    from the last stage to the first, else by way of the client.
    """

    num_blocks: int
    fingerprint: str
    dtype: str
    sequences: int = 1
    max_length: int = 1
    part: Span | None = None
    prompt_tokens: int = 0
    row_bytes: int = 8192
    objective: Objective = Objective.LATENCY
    server_head: bool = True

    @property
    def span(self) -> Span:
        """The blocks to cover."""
        return self.part or Span(0, self.num_blocks)

    @property
    def kv_tokens(self) -> int:
        """Tokens to reserve on each stage."""
        return self.sequences * self.max_length

    @property
    def errand(self) -> Errand:
        """What it costs is asked of."""
        prompt = self.prompt_tokens or min(USUAL_PROMPT_TOKENS, self.max_length // 2)
        return Errand(
            rows=self.sequences,
            prompt_tokens=prompt,
            new_tokens=min(max(self.max_length - prompt, 1), MOST_NEW_TOKENS),
            kv_tokens=self.kv_tokens,
            row_bytes=self.row_bytes,
            objective=self.objective,
            server_head=self.server_head and self.part is None,
        )


@dataclass(frozen=True, slots=True)
class _Rejection:
    """Why a server can't be used; `too_small` when a smaller session could use it."""

    offer: Offer
    reason: str
    too_small: bool = False


def choose_route(
    offers: Iterable[Offer],
    demand: Demand,
    *,
    tie_break: Callable[[], float],
    exclude: frozenset[PeerId] = frozenset(),
    busy: Mapping[PeerId, str] | None = None,
    known: Knowledge = NOTHING,
) -> Route:
    """The route for a session, deterministic for given offers and numbers of `tie_break`.

    `exclude` failed of late, `busy` can't be taken for the reason given. `known` is what
    is known besides the offers.

    Raises SwarmError naming the blocks that no usable server holds and why others were
    left out; RequestError when servers hold them all but the session is too large for
    some.
    """
    ordered = sorted(offers, key=lambda offer: offer.peer)
    barred = {**dict.fromkeys(exclude, "failed before"), **(busy or {})}
    verdicts = [_judge(offer, demand, barred) for offer in ordered]
    usable = [o for o, verdict in zip(ordered, verdicts, strict=True) if verdict is None]
    factors = spread_factors([tie_break() for _ in usable])
    found = find_route(usable, demand.span, demand.errand, known, factors)
    if found is None:
        raise _no_route(usable, [v for v in verdicts if v is not None], demand)
    return found.route


def _judge(offer: Offer, demand: Demand, barred: Mapping[PeerId, str]) -> _Rejection | None:
    reasons = (
        (offer.fingerprint != demand.fingerprint, "serves another model"),
        (offer.state != "online", f"is {offer.state}"),
        (offer.peer in barred, barred.get(offer.peer, "")),
        (offer.dtype != demand.dtype, f"serves {offer.dtype}, not {demand.dtype}"),
        (offer.span.end > demand.num_blocks, "announces blocks the model does not have"),
    )
    for applies, reason in reasons:
        if applies:
            return _Rejection(offer, reason)
    if offer.max_length < demand.max_length:
        reason = f"takes at most {offer.max_length} tokens a sequence"
        return _Rejection(offer, reason, too_small=True)
    if offer.kv_tokens < demand.kv_tokens:
        return _Rejection(offer, f"holds {offer.kv_tokens} KV tokens in all", too_small=True)
    return None


def _no_route(
    usable: Sequence[Offer], rejected: Sequence[_Rejection], demand: Demand
) -> SwarmError | RequestError:
    missing = _missing([offer.span for offer in usable], demand.span)
    small = [r for r in rejected if r.too_small]
    widened = [offer.span for offer in usable] + [r.offer.span for r in small]
    if small and not _missing(widened, demand.span):
        limit = min(small, key=lambda r: (r.offer.max_length, r.offer.kv_tokens))
        return RequestError(
            f"{demand.sequences} sequences of {demand.max_length} tokens don't fit: "
            f"the server of blocks {limit.offer.span} {limit.reason}; "
            "ask for a shorter max_length or a smaller batch"
        )
    blocks = ", ".join(str(span) for span in missing)
    message = f"no server holds blocks {blocks} of 0:{demand.num_blocks}"
    rejected = [r for r in rejected if demand.part is None or _meet(r.offer.span, demand.part)]
    if rejected:
        left_out = "; ".join(f"{r.offer.peer[-8:]} ({r.offer.span}) {r.reason}" for r in rejected)
        message += f" (left out: {left_out})"
    return SwarmError(f"{message}; start a server for them, or wait until one has joined")


def _missing(spans: Iterable[Span], wanted: Span) -> list[Span]:
    gaps = missing_spans(spans, wanted.end)
    return [Span(max(gap.start, wanted.start), gap.end) for gap in gaps if gap.end > wanted.start]


def _meet(span: Span, other: Span) -> bool:
    return span.start < other.end and other.start < span.end


def missing_spans(spans: Iterable[Span], num_blocks: int) -> list[Span]:
    """The gaps that `spans` leave in `0:num_blocks`, in order."""
    gaps: list[Span] = []
    reached = 0
    for span in sorted(spans):
        if (end := min(span.start, num_blocks)) > reached:
            gaps.append(Span(reached, end))
        reached = max(reached, span.end)
    if reached < num_blocks:
        gaps.append(Span(reached, num_blocks))
    return gaps
