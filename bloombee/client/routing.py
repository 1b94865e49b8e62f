"""Which servers compute a session: a pure choice over the records of a swarm.

The fewest stages win, since every stage is one more hop for each token; among
routes of equally many stages the one whose blocks are computed fastest; among
equals the injected random numbers decide, so that clients spread over them. A
server may be asked for a part of its span. With contiguous spans no server
ever appears twice: two parts of one span joined would be one stage fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bloombee.core import PeerId, Route, Span, Stage
from bloombee.errors import RequestError, SwarmError


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

    `part` are the blocks to cover, None for all of the model.
    """

    num_blocks: int
    fingerprint: str
    dtype: str
    sequences: int = 1
    max_length: int = 1
    part: Span | None = None

    @property
    def span(self) -> Span:
        """The blocks to cover."""
        return self.part or Span(0, self.num_blocks)

    @property
    def kv_tokens(self) -> int:
        """Tokens to reserve on each stage."""
        return self.sequences * self.max_length


@dataclass(frozen=True, slots=True)
class _Rejection:
    """Why a server can't be used; `too_small` when a smaller session could use it."""

    offer: Offer
    reason: str
    too_small: bool = False


@dataclass(frozen=True, slots=True)
class _Path:
    """The best way found to a block: ordered by stages, then cost, then chance."""

    stages: int
    cost: float
    chance: float
    route: tuple[Stage, ...]

    @property
    def key(self) -> tuple[int, float, float]:
        return self.stages, round(self.cost, 9), self.chance


def choose_route(
    offers: Iterable[Offer],
    demand: Demand,
    *,
    tie_break: Callable[[], float],
    exclude: frozenset[PeerId] = frozenset(),
    busy: Mapping[PeerId, str] | None = None,
) -> Route:
    """The route for a session, deterministic for given offers and numbers of `tie_break`.

    `exclude` failed of late, `busy` can't be taken for the reason given.

    Raises SwarmError naming the blocks that no usable server holds and why others were
    left out; RequestError when servers hold them all but the session is too large for
    some.
    """
    ordered = sorted(offers, key=lambda offer: offer.peer)
    barred = {**dict.fromkeys(exclude, "failed before"), **(busy or {})}
    verdicts = [_judge(offer, demand, barred) for offer in ordered]
    usable = [o for o, verdict in zip(ordered, verdicts, strict=True) if verdict is None]
    path = _best_path(usable, demand.span, tie_break)
    if path is None:
        raise _no_route(usable, [v for v in verdicts if v is not None], demand)
    return Route(path.route)


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


def _best_path(
    usable: Sequence[Offer], whole: Span, tie_break: Callable[[], float]
) -> _Path | None:
    chances = {offer.peer: tie_break() for offer in usable}
    cuts = {b for o in usable for b in (o.span.start, o.span.end) if whole.start < b < whole.end}
    borders = sorted(cuts | {whole.end})
    best: dict[int, _Path] = {whole.start: _Path(0, 0.0, 0.0, ())}
    for start in (whole.start, *borders):
        path = best.get(start)
        if path is None:
            continue
        for offer in usable:
            for end in (b for b in borders if b > start) if start in offer.span else ():
                if end > offer.span.end:
                    break
                _offer_path(best, path, offer, Span(start, end), chances[offer.peer])
    return best.get(whole.end)


def _offer_path(
    best: dict[int, _Path], path: _Path, offer: Offer, span: Span, chance: float
) -> None:
    longer = _Path(
        path.stages + 1,
        path.cost + len(span) / (len(offer.span) * max(offer.throughput_tokens_per_s, 1e-6)),
        path.chance + chance,
        (*path.route, Stage(offer.peer, span)),
    )
    known = best.get(span.end)
    if known is None or longer.key < known.key:
        best[span.end] = longer


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
