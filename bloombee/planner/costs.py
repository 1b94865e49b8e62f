"""The cost model: every time that a plan of one shape can be made of, as arrays.

A plan is a cycle: it enters at a first peer, passes stages and hops, leaves a last peer and
closes. Its latency is the sum of all these times, its bottleneck the busiest resource among
them. Each stage is a resource (busy as long as it takes), each directed link is one (busy
for bytes / beta; alpha passes while others are sent), and so are the codec's two ends.

With the client's head each way round passes the client, with the servers' only ids travel
from the last stage to the first. That closing depends on both, so costs come in groups:
`enter_s[c, g, p]` and `leave_s[c, g, p]` belong together, one group for the client's head,
one for each first peer otherwise. Axes: c codecs, g groups, p peers, n blocks of a span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.memory import Load, Memory, Residence, residence, transfer_seconds
from bloombee.planner.workload import Head

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bloombee.planner.profiles import Cluster, Codec, ModelFacts, Network
    from bloombee.planner.workload import Shape, Workload

    Floats = NDArray[np.float64]

ID_BYTES = 4
MIDDLE, FIRST, LAST, ONLY = range(4)
"""Roles of a stage, the first axis of `stage_s`."""


class Focus(StrEnum):
    """Which phase the costs are of."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Times of one shape: `stage_s[role, p, n]`, `hop_s[c, p, q]`, see the module's text.

    Infinite where something doesn't fit or there is no link; `stage_s[..., 0]` always is.
    `same_roles`: the four roles cost alike.
    """

    stage_s: Floats
    hop_s: Floats
    hop_busy_s: Floats
    enter_s: Floats
    enter_busy_s: Floats
    leave_s: Floats
    leave_busy_s: Floats
    micro_batches: int
    same_roles: bool

    @property
    def peers(self) -> int:
        """N."""
        return self.stage_s.shape[1]

    @property
    def blocks(self) -> int:
        """L."""
        return self.stage_s.shape[2] - 1

    def narrowed(self, groups: NDArray[np.int64]) -> Costs:
        """The same with only these groups."""
        return replace(
            self,
            enter_s=self.enter_s[:, groups],
            enter_busy_s=self.enter_busy_s[:, groups],
            leave_s=self.leave_s[:, groups],
            leave_busy_s=self.leave_busy_s[:, groups],
        )

    def take(self, peers: NDArray[np.int64]) -> Costs:
        """The costs of only these peers, in this order."""
        groups = peers if self.enter_s.shape[1] > 1 else np.zeros(1, dtype=np.int64)
        rows, grid = groups[:, None], peers[:, None]
        return replace(
            self,
            stage_s=self.stage_s[:, peers],
            hop_s=self.hop_s[:, grid, peers],
            hop_busy_s=self.hop_busy_s[:, grid, peers],
            enter_s=self.enter_s[:, rows, peers],
            enter_busy_s=self.enter_busy_s[:, rows, peers],
            leave_s=self.leave_s[:, rows, peers],
            leave_busy_s=self.leave_busy_s[:, rows, peers],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """Costs, and where each span would lie in memory, by role."""

    costs: Costs
    residences: tuple[Residence, ...]


@dataclass(frozen=True, slots=True)
class _Message:
    """Payloads of one kind of pass: hidden rows between stages, rows back to the client."""

    rows: int
    rows_back: int


def price(
    model: ModelFacts, cluster: Cluster, workload: Workload, shape: Shape, focus: Focus
) -> Priced:
    """All times of `shape`. Decode counts its share of prefill if the workload says so."""
    load = Load.of(model, workload, shape)
    memory = Memory.of(cluster.peers)
    kept = shape.head is Head.CLIENT
    ends = (0,) if kept else (0, model.embed_bytes, model.head_bytes, model.both_ends_bytes)
    residences = tuple(residence(model, memory, load, extra) for extra in ends)
    decode = _decode(model, cluster, workload, shape, residences)
    chunk = _prefill(model, cluster, workload, shape, residences)
    if focus is Focus.PREFILL:
        costs = replace(chunk, micro_batches=shape.chunks(workload, shape.batch))
    elif workload.count_prefill:
        passes = shape.chunks(workload, shape.micro_batch)
        costs = _blend(decode, chunk, passes / workload.new_tokens)
    else:
        costs = decode
    return Priced(costs, residences)


def _decode(
    model: ModelFacts,
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    residences: tuple[Residence, ...],
) -> Costs:
    rows = shape.micro_batch
    blocks_s = [peer.decode.at(rows, workload.usual_tokens) for peer in cluster.peers]
    transfers = [where.transfer_s for where in residences]
    stages = _stages(cluster, shape.head, np.array(blocks_s), transfers, rows)
    message = _Message(rows, rows)
    return _assemble(model, cluster, shape, stages, message, through_client=False)


def _prefill(
    model: ModelFacts,
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    residences: tuple[Residence, ...],
) -> Costs:
    """Costs of one chunk of prompt tokens."""
    rows = min(shape.chunk_tokens, shape.batch * workload.prompt_tokens)
    back = max(1, rows // workload.prompt_tokens)
    blocks_s = [peer.prefill.at(rows, workload.prompt_tokens / 2) for peer in cluster.peers]
    memory = Memory.of(cluster.peers)
    pages = -(-workload.full_tokens // workload.page_tokens) * shape.batch
    share = rows * model.kv_bytes_per_token / pages
    transfers = [_chunk_transfer_s(model, memory, where, share) for where in residences]
    stages = _stages(cluster, shape.head, np.array(blocks_s), transfers, back)
    return _assemble(model, cluster, shape, stages, _Message(rows, back), through_client=True)


def _chunk_transfer_s(
    model: ModelFacts, memory: Memory, where: Residence, bytes_per_page: float
) -> Floats:
    """Time to write a chunk's share of the offloaded KV, and to read streamed blocks."""
    streamed = (where.streamed * model.block_bytes).astype(np.float64)
    moved = where.kv_pages * np.float64(bytes_per_page) + streamed
    seconds = transfer_seconds(memory, moved, where.disk_bytes)
    return np.where(np.isinf(where.transfer_s), np.inf, seconds)


def _stages(
    cluster: Cluster, head: Head, block_s: Floats, transfers: list[Floats], head_rows: int
) -> Floats:
    """`[4, N, L + 1]` (role, peer, blocks): compute, and transfers beside it or after it."""
    peers = cluster.peers
    blocks = np.arange(transfers[0].shape[1], dtype=np.float64)
    passes_s = np.array([peer.pass_s for peer in peers])[:, None]
    overlaps = np.array([peer.overlaps for peer in peers])[:, None]
    base: Floats = passes_s + blocks * block_s[:, None]
    heads_s = np.zeros((len(peers), 1))
    if head is Head.SERVER:
        heads_s = np.array([[peer.head.at(head_rows, 0)] for peer in peers])
    stages: list[Floats] = []
    for role, transfer in enumerate(transfers):
        compute: Floats = base + heads_s if role in (LAST, ONLY) else base
        with np.errstate(invalid="ignore"):
            stage = np.where(overlaps, np.maximum(compute, transfer), compute + transfer)
        stage[:, 0] = np.inf
        stages.append(stage)
    if len(stages) == 1:
        return np.broadcast_to(stages[0], (4, *stages[0].shape))
    return np.stack(stages)


def _assemble(
    model: ModelFacts,
    cluster: Cluster,
    shape: Shape,
    stages: Floats,
    message: _Message,
    *,
    through_client: bool,
) -> Costs:
    """Put stages and links together; `through_client`: also ids come from the client."""
    net, row = cluster.network, model.row_bytes
    hop_s, hop_busy_s = _links(net, cluster.codecs, message.rows * row)
    if shape.head is Head.CLIENT:
        back_s, back_busy_s = _links(net, cluster.codecs, message.rows_back * row)
        head_s = cluster.client_head.at(message.rows_back, 0)
        enter_s, enter_busy = hop_s[:, -1:, :-1], hop_busy_s[:, -1:, :-1]
        leave_s = back_s[:, None, :-1, -1] + head_s
        leave_busy = np.maximum(back_busy_s[:, None, :-1, -1], head_s)
    else:
        ends = _id_ends(net, message, through_client=through_client)
        alike = (len(cluster.codecs), *ends[0].shape)
        enter_s, enter_busy, leave_s, leave_busy = (np.broadcast_to(e, alike) for e in ends)
    return Costs(
        stages,
        hop_s[:, :-1, :-1],
        hop_busy_s[:, :-1, :-1],
        enter_s,
        enter_busy,
        leave_s,
        leave_busy,
        shape.micro_batches,
        same_roles=shape.head is Head.CLIENT,
    )


def _links(net: Network, codecs: tuple[Codec, ...], payload: int) -> tuple[Floats, Floats]:
    """`[c, N + 1, N + 1]`: latency and occupancy of every link with every codec."""
    seconds: list[Floats] = []
    busy: list[Floats] = []
    for codec in codecs:
        wire_s, wire_busy = net.seconds(payload * codec.ratio)
        encode, decode = payload / codec.encode_bytes_per_s, payload / codec.decode_bytes_per_s
        seconds.append(wire_s + (encode + decode))
        busy.append(np.maximum(wire_busy, max(encode, decode)))
    return np.stack(seconds), np.stack(busy)


def _id_ends(
    net: Network, message: _Message, *, through_client: bool
) -> tuple[Floats, Floats, Floats, Floats]:
    """Enter and leave, each `[g, p]`, when only ids close the way round."""
    back_s, back_busy = net.seconds(message.rows_back * ID_BYTES)
    if through_client:
        in_s, in_busy = net.seconds(message.rows * ID_BYTES)
        ends = in_s[-1:, :-1], in_busy[-1:, :-1], back_s[None, :-1, -1], back_busy[None, :-1, -1]
        return ends[0], ends[1], ends[2], ends[3]
    peers = len(net) - 1
    enter = np.full((peers, peers), np.inf)
    np.fill_diagonal(enter, 0.0)
    leave, leave_busy = back_s[:-1, :-1].T.copy(), back_busy[:-1, :-1].T.copy()
    np.fill_diagonal(leave, 0.0)
    np.fill_diagonal(leave_busy, 0.0)
    return enter, enter, leave, leave_busy


def _blend(decode: Costs, chunk: Costs, passes_per_token: float) -> Costs:
    """Decode with its share of prefill; the closing of decode, whose groups differ, stays."""
    return Costs(
        decode.stage_s + chunk.stage_s * passes_per_token,
        decode.hop_s + chunk.hop_s * passes_per_token,
        decode.hop_busy_s + chunk.hop_busy_s * passes_per_token,
        decode.enter_s + chunk.enter_s * passes_per_token,
        decode.enter_busy_s + chunk.enter_busy_s * passes_per_token,
        decode.leave_s + chunk.leave_s * passes_per_token,
        decode.leave_busy_s + chunk.leave_busy_s * passes_per_token,
        decode.micro_batches,
        decode.same_roles,
    )
