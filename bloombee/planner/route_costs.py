"""What every server and hop that a session could use would cost it, as arrays.

Seconds are of one token of every sequence: a way through all stages, and with it the
token's share of computing the prompt. A stage costs `fixed_s + blocks x unit_s`; a server
that decodes r rows serves r more, in one pass, and a session that comes to a busy one
waits for half a pass. What is not known is taken to be usual. Axis: k holdings, each a range
of blocks that one server could compute a part of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bloombee.planner.hearsay import LEAST_BLOCK_S, Knowledge, ServerFacts
from bloombee.planner.profiles import TimeTable
from bloombee.planner.workload import Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bloombee.core import PeerId, Span

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

USUAL_ALPHA_S = 0.025
"""One way between two homes."""
USUAL_BYTES_PER_S = 50e6 / 8
HANDLING_S = 3e-4
"""What a hop costs besides the link: reading, checking, queueing, sending."""
ROW_SHARE = 0.06
"""What one row more adds to a pass of one row, where only the latter is known."""
CHUNK_TOKENS = 256
"""Of a prompt in one pass."""
FULL_S = 30.0
"""How long a session queues for KV where there is none, about; as often as others wait before."""
LEAST_TOKENS_PER_S = 1e-3


class Server(Protocol):
    """What the cost model reads of a record."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def span(self) -> Span: ...
    @property
    def throughput_tokens_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a session is going to do: `rows` sequences of `prompt_tokens` and `new_tokens`.

    It takes `kv_tokens` on every stage. `THROUGHPUT` counts the busiest resource of
    `in_flight` sessions that share a route, `LATENCY` only the way of one token: back to the
    first stage with the server head, to the client without.
    """

    rows: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 128
    kv_tokens: int = 0
    row_bytes: int = 8192
    objective: Objective = Objective.LATENCY
    server_head: bool = True
    in_flight: int = 4

    @property
    def chunks(self) -> float:
        """Passes of the prompts for each token that follows."""
        passes = -(-self.rows * self.prompt_tokens // CHUNK_TOKENS)
        return passes / self.new_tokens

    @property
    def hop_bytes(self) -> float:
        """Of a token's rows, and of its share of the prompts'."""
        return self.rows * self.row_bytes * (1 + self.prompt_tokens / self.new_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class RouteCosts:
    """Costs of K holdings: blocks `[start[k], end[k])`, all of which `owner[k]` has.

    `queue_s` is added to a stage without keeping it busy. `ring_s[k, l]` is the way from the
    last stage k to the first one l, None where tokens pass the client.
    """

    owner: Ints
    start: Ints
    end: Ints
    fixed_s: Floats
    unit_s: Floats
    queue_s: Floats
    enter_s: Floats
    leave_s: Floats
    hop_s: Floats
    hop_busy_s: Floats
    ring_s: Floats | None

    def __len__(self) -> int:
        return len(self.owner)

    def turned(self, whole: Span) -> RouteCosts:
        """The same the other way round: from the last block to the first."""
        ends = whole.start + whole.end
        return replace(
            self,
            start=ends - self.end,
            end=ends - self.start,
            enter_s=self.leave_s,
            leave_s=self.enter_s,
            hop_s=self.hop_s.T,
            hop_busy_s=self.hop_busy_s.T,
        )

    def take(self, holdings: Ints, start: Ints, end: Ints) -> RouteCosts:
        """These holdings, cut to `[start, end)`; those of which nothing is left are dropped."""
        left = start < end
        kept = holdings[left]
        grid = np.ix_(kept, kept)
        return RouteCosts(
            owner=self.owner[kept],
            start=start[left],
            end=end[left],
            fixed_s=self.fixed_s[kept],
            unit_s=self.unit_s[kept],
            queue_s=self.queue_s[kept],
            enter_s=self.enter_s[kept],
            leave_s=self.leave_s[kept],
            hop_s=self.hop_s[grid],
            hop_busy_s=self.hop_busy_s[grid],
            ring_s=None if self.ring_s is None else self.ring_s[grid],
        )


def costs_of(
    servers: Sequence[Server],
    whole: Span,
    errand: Errand,
    known: Knowledge,
    factors: Sequence[float] | None = None,
) -> RouteCosts:
    """Costs of a route over `whole` for all `servers`, each of which holds a part of it.

    Whatever leads through a server, the hop to it included, is multiplied by its factor.
    """
    facts = [known.of(server.peer) for server in servers]
    stages = [_stage(s, f, errand) for s, f in zip(servers, facts, strict=True)]
    fixed_s, unit_s, queue_s, head_s = np.array(stages, dtype=np.float64).reshape(-1, 4).T
    alpha_s, bytes_per_s = links(servers, known)
    times = np.array([fact.correction for fact in facts], dtype=np.float64)
    if factors is not None:
        times = times * np.asarray(factors, dtype=np.float64)
    hop_busy_s = errand.hop_bytes / bytes_per_s
    # Beside every token's rows, the prompt's have to come once.
    hop_s = (alpha_s + HANDLING_S) * (1 + 1 / errand.new_tokens) + hop_busy_s
    np.fill_diagonal(hop_s, np.inf)
    way_s = np.array([_way_s(fact) for fact in facts]) + HANDLING_S
    enter_s, leave_s, ring_s = _ends(errand, way_s, alpha_s)
    return RouteCosts(
        owner=np.arange(len(servers)),
        start=np.array([max(s.span.start, whole.start) for s in servers], dtype=np.int64),
        end=np.array([min(s.span.end, whole.end) for s in servers], dtype=np.int64),
        fixed_s=fixed_s * times,
        unit_s=unit_s * times,
        queue_s=queue_s * times,
        enter_s=enter_s * times,
        leave_s=(leave_s + head_s) * times,
        hop_s=hop_s * times,
        hop_busy_s=hop_busy_s * times,
        ring_s=None if ring_s is None else ring_s * times,
    )


def _stage(server: Server, facts: ServerFacts, errand: Errand) -> tuple[float, float, float, float]:
    """Seconds of a stage: for a pass, for a block of it, for queueing, and for the head."""
    decode, prefill = facts.decode, facts.prefill
    if decode is None or prefill is None:
        usual = _usual_table(server)
        decode, prefill = decode or usual, prefill or usual
    merged = errand.rows + facts.decode_rows
    token_s = decode.at(merged, errand.prompt_tokens + errand.new_tokens / 2)
    prompt_rows = min(errand.rows * errand.prompt_tokens, CHUNK_TOKENS)
    chunk_s = prefill.at(prompt_rows, errand.prompt_tokens / 2) if prompt_rows else 0.0
    busy = 1 + facts.busy / 2
    unit_s = max(token_s, LEAST_BLOCK_S) + errand.chunks * max(chunk_s, 0.0)
    fixed_s = facts.pass_s * (1 + errand.chunks)
    head_s = facts.head.at(merged, 0) if facts.head is not None and errand.server_head else 0.0
    return fixed_s * busy, unit_s * busy, _queue_s(facts, errand), head_s


def _usual_table(server: Server) -> TimeTable:
    """A block's times as its announced tokens/s, those of one sequence, have them."""
    one_s = 1 / (max(server.throughput_tokens_per_s, LEAST_TOKENS_PER_S) * len(server.span))
    one_s = max(one_s, LEAST_BLOCK_S)
    return TimeTable((1, 2), (0,), ((one_s,), (one_s * (1 + ROW_SHARE),)))


def _queue_s(facts: ServerFacts, errand: Errand) -> float:
    free = facts.free_tokens
    if free is None or (free >= errand.kv_tokens and not facts.waiting):
        return 0.0
    return FULL_S * (1 + facts.waiting) / errand.new_tokens


def _way_s(facts: ServerFacts) -> float:
    return USUAL_ALPHA_S if facts.rtt_s is None else facts.rtt_s / 2


def _ends(errand: Errand, way_s: Floats, alpha_s: Floats) -> tuple[Floats, Floats, Floats | None]:
    """What entering, leaving and closing the ring cost each token."""
    if not errand.server_head:
        back_s = errand.rows * errand.row_bytes / USUAL_BYTES_PER_S
        return way_s, way_s + back_s, None
    if errand.objective is Objective.THROUGHPUT:
        return way_s, way_s, None  # of many that follow each other, the ring shows in none
    once_s = way_s / errand.new_tokens
    ring_s = alpha_s + HANDLING_S
    np.fill_diagonal(ring_s, 0.0)
    return once_s, once_s, ring_s


def links(servers: Sequence[Server], known: Knowledge) -> tuple[Floats, Floats]:
    """Alpha and bytes a second from every server to every other.

    Between two whose distance nobody told, the farther one's from the client is taken. Nobody
    counts as nearer to another than half of what the client's own distances allow.
    """
    rtt = np.array([_way_s(known.of(server.peer)) for server in servers], dtype=np.float64)
    alpha_s = np.maximum(rtt[:, None], rtt[None, :])
    bytes_per_s = np.full(alpha_s.shape, USUAL_BYTES_PER_S)
    index = {server.peer: i for i, server in enumerate(servers)}
    told = np.zeros(alpha_s.shape)
    for (source, target), link in known.links.items():
        if (i := index.get(source)) is None or (j := index.get(target)) is None:
            continue
        # Of two words on one distance the larger counts: one of them may be a lie.
        told[i, j] = told[j, i] = max(told[i, j], link.alpha_s)
        if link.bytes_per_s:
            bytes_per_s[i, j] = link.bytes_per_s
    own = np.array([known.of(server.peer).rtt_s is not None for server in servers], dtype=bool)
    least = np.where(own[:, None] & own[None, :], np.abs(rtt[:, None] - rtt[None, :]) / 2, 0.0)
    alpha_s = np.where(told > 0, np.maximum(told, least), alpha_s)
    return alpha_s, bytes_per_s
