"""What the swarm looked like at one moment; pure, so routing and placement can share it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from bloombee.core import PeerId, Span
from bloombee.swarm.records import ModelAnnouncement, ServerRecord, ServerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Vote = TypeVar("_Vote", str, int)

SERVING = frozenset({ServerState.ONLINE})


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that the swarm knows: its name and block count as most servers state them."""

    fingerprint: str
    model: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """All live records, one per peer and model, and when they were read.

    `models` lists every model announced, also one of which no record was found.
    """

    records: tuple[ServerRecord, ...]
    models: tuple[ModelEntry, ...]
    taken_at_s: float

    def find(self, peer: PeerId) -> ServerRecord | None:
        """The record of `peer`, or None."""
        return next((record for record in self.records if record.peer == peer), None)

    def model(self, fingerprint: str) -> ModelEntry | None:
        """The model with this fingerprint, or None when nobody announced it."""
        return next((entry for entry in self.models if entry.fingerprint == fingerprint), None)

    def select(
        self,
        *,
        fingerprint: str | None = None,
        dtype: str | None = None,
        states: frozenset[ServerState] | None = None,
        where: Callable[[ServerRecord], bool] | None = None,
    ) -> SwarmSnapshot:
        """The same snapshot with only the records that meet every condition given."""
        kept = tuple(
            record
            for record in self.records
            if (fingerprint is None or record.fingerprint == fingerprint)
            and (dtype is None or record.dtype == dtype)
            and (states is None or record.state in states)
            and (where is None or where(record))
        )
        return replace(self, records=kept)

    def coverage(self, num_blocks: int) -> tuple[float, ...]:
        """Summed tokens/s that serve each of `num_blocks` blocks; select a model first."""
        return self._per_block(num_blocks, lambda record: record.throughput_tokens_per_s)

    def servers_per_block(self, num_blocks: int) -> tuple[int, ...]:
        """How many servers hold each of `num_blocks` blocks; select a model first."""
        return tuple(int(count) for count in self._per_block(num_blocks, lambda _: 1.0))

    def missing(self, num_blocks: int) -> tuple[Span, ...]:
        """The ranges of blocks that no server holds, in order; select a model first."""
        return _gaps(self.servers_per_block(num_blocks))

    def missing_text(self, num_blocks: int) -> str:
        """The missing ranges as `10:20, 25:30`; empty when every block is held."""
        return ", ".join(str(span) for span in self.missing(num_blocks))

    def _per_block(
        self, num_blocks: int, weight: Callable[[ServerRecord], float]
    ) -> tuple[float, ...]:
        totals = [0.0] * num_blocks
        for record in self.records:
            for block in range(record.span.start, min(record.span.end, num_blocks)):
                totals[block] += weight(record)
        return tuple(totals)


def assemble(
    records: Iterable[ServerRecord], announcements: Iterable[ModelAnnouncement], now_s: float
) -> SwarmSnapshot:
    """A snapshot from everything read, in several copies and in any order.

    Of one peer the record published last counts. Records that state another number
    of blocks than most peers do for the same fingerprint are dropped.
    """
    latest: dict[PeerId, ServerRecord] = {}
    for record in records:
        known = latest.get(record.peer)
        if known is None or known.published_at_s < record.published_at_s:
            latest[record.peer] = record
    models = elect_models([*announcements, *(_announced(record) for record in latest.values())])
    blocks = {entry.fingerprint: entry.num_blocks for entry in models}
    kept = [r for r in latest.values() if r.num_blocks == blocks[r.fingerprint]]
    kept.sort(key=lambda record: (record.model, record.fingerprint, record.span, record.peer))
    return SwarmSnapshot(tuple(kept), models, now_s)


def elect_models(announcements: Iterable[ModelAnnouncement]) -> tuple[ModelEntry, ...]:
    """One entry for each fingerprint, as most peers describe it; most announced first."""
    votes: dict[str, dict[PeerId, ModelAnnouncement]] = {}
    for announcement in announcements:
        votes.setdefault(announcement.fingerprint, {})[announcement.peer] = announcement
    by_weight = sorted(votes.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        ModelEntry(
            fingerprint,
            _most_common(vote.model for vote in peers.values()),
            _most_common(vote.num_blocks for vote in peers.values()),
        )
        for fingerprint, peers in by_weight
    )


def _announced(record: ServerRecord) -> ModelAnnouncement:
    return ModelAnnouncement(record.peer, record.fingerprint, record.model, record.num_blocks)


def _most_common(values: Iterable[_Vote]) -> _Vote:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def _gaps(counts: tuple[int, ...]) -> tuple[Span, ...]:
    spans: list[Span] = []
    start: int | None = None
    for block, count in enumerate((*counts, 1)):
        if not count and start is None:
            start = block
        elif count and start is not None:
            spans.append(Span(start, block))
            start = None
    return tuple(spans)
