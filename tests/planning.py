"""Small random planning problems, and the plain twins that try everything."""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import TYPE_CHECKING

import numpy as np

from bloombee.core import PeerId
from bloombee.planner.costs import FIRST, LAST, MIDDLE, ONLY, Costs
from bloombee.planner.profiles import RAW, Cluster, Codec, ModelFacts, Network, PeerProfile
from bloombee.planner.profiles import TimeTable as Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bloombee.planner.profiles import Floats
    from bloombee.planner.workload import Goal

    Option = tuple[float, float]

SPLIT = Codec("split", 0.68, 2.4e9, 4.3e9)


def random_costs(seed: int, *, peers: int, blocks: int, codecs: int, server_head: bool) -> Costs:
    """Times without rhyme or reason: some spans don't fit, some links are missing."""
    rng = np.random.default_rng(seed)

    def times(*shape: int) -> Floats:
        # Few distinct values, so that ties are common.
        values = rng.integers(1, 9, shape).astype(np.float64)
        return np.where(rng.random(shape) < 0.15, np.inf, values)

    def link(*shape: int) -> tuple[Floats, Floats]:
        busy = times(*shape)
        return busy + rng.integers(0, 4, shape), busy

    roles = 4 if server_head else 1
    stage = np.sort(times(roles, peers, blocks + 1), axis=2)
    stage = np.broadcast_to(stage, (4, peers, blocks + 1)).copy()
    stage[..., 0] = np.inf
    groups = peers if server_head else 1
    hop, hop_busy = link(codecs, peers, peers)
    enter, enter_busy = link(codecs, groups, peers)
    leave, leave_busy = link(codecs, groups, peers)
    if server_head:
        elsewhere = ~np.eye(peers, dtype=bool)
        enter[:, elsewhere] = enter_busy[:, elsewhere] = np.inf
    micro_batches = int(rng.integers(1, 6))
    return Costs(
        stage,
        hop,
        hop_busy,
        enter,
        enter_busy,
        leave,
        leave_busy,
        micro_batches,
        same_roles=not server_head,
    )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way of writing `total` as a sum of that many positive numbers."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in zip(edges, edges[1:], strict=False))


def every_order(peers: int) -> Iterator[tuple[int, ...]]:
    """Every order of every set of peers."""
    for size in range(1, peers + 1):
        yield from permutations(range(peers), size)


def sub_orders(order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way of leaving peers out of an order."""
    for size in range(1, len(order) + 1):
        yield from combinations(order, size)


def brute_force(costs: Costs, orders: Iterator[tuple[int, ...]], goal: Goal) -> float:
    """The least seconds over all these orders, all spans, codecs and groups."""
    least = float("inf")
    for order in orders:
        if len(order) > costs.blocks:
            continue
        loops = [loop for loop in _loops(costs, order) if np.isfinite(loop[0])]
        for spans in compositions(costs.blocks, len(order)):
            stages = _stage_times(costs, order, spans)
            if not np.isfinite(sum(stages)):
                continue
            for links_s, links_busy in loops:
                latency, bottleneck = sum(stages) + links_s, max(*stages, links_busy)
                least = min(least, float(goal.seconds(latency, bottleneck, costs.micro_batches)))
    return least


def _stage_times(costs: Costs, order: Sequence[int], spans: Sequence[int]) -> list[float]:
    last = len(order) - 1
    roles = [ONLY] if not last else [FIRST, *[MIDDLE] * (last - 1), LAST]
    return [float(costs.stage_s[r, p, n]) for r, p, n in zip(roles, order, spans, strict=True)]


def _loops(costs: Costs, order: Sequence[int]) -> Iterator[Option]:
    """Latency and occupancy of all links together, for every choice of codecs and group."""
    codecs = range(costs.hop_s.shape[0])
    hops = [
        [(float(costs.hop_s[c, p, q]), float(costs.hop_busy_s[c, p, q])) for c in codecs]
        for p, q in zip(order, order[1:], strict=False)
    ]
    for group in range(costs.enter_s.shape[1]):
        ends = [
            [(float(seconds[c, group, p]), float(busy[c, group, p])) for c in codecs]
            for seconds, busy, p in (
                (costs.enter_s, costs.enter_busy_s, order[0]),
                (costs.leave_s, costs.leave_busy_s, order[-1]),
            )
        ]
        for chosen in product(*hops, *ends):
            yield sum(s for s, _ in chosen), max(busy for _, busy in chosen)


def random_cluster(seed: int, peers: int, *, tight: bool = False) -> Cluster:
    """Machines and links of a plausible swarm; `tight` ones must offload or stream."""
    rng = np.random.default_rng(seed)
    made: list[PeerProfile] = []
    for index in range(peers):
        block_s = float(rng.uniform(0.5e-3, 3e-3))
        made.append(
            PeerProfile(
                peer=PeerId(f"peer-{index}"),
                device_bytes=int(rng.uniform(2e9, 8e9) if tight else rng.uniform(16e9, 48e9)),
                decode=_table(block_s, (1, 64), (1.0, 2.0)),
                prefill=_table(block_s, (1, 512), (1.0, 10.0)),
                head=_table(block_s, (1, 64), (1.0, 1.2)),
                pass_s=1e-3,
                workspace_bytes=int(rng.integers(0, 10**9)),
                workspace_bytes_per_row=int(rng.integers(0, 10**5)),
                host_bytes=int(rng.uniform(0, 32e9)),
                host_device_bytes_per_s=float(rng.choice([0.0, 6e9, 25e9])),
                disk_bytes_per_s=float(rng.choice([0.0, 2e9])),
                overlaps=bool(rng.integers(2)),
                streams_weights=tight and bool(rng.integers(2)),
                price_per_hour=float(rng.uniform(0.1, 2.0)),
                watts=float(rng.uniform(50, 400)),
            )
        )
    nodes = peers + 1
    network = Network(
        rng.uniform(2e-3, 5e-2, (nodes, nodes)), rng.uniform(2.5e6, 6e7, (nodes, nodes))
    )
    return Cluster(tuple(made), network, (RAW, SPLIT), Table.flat(2e-3))


def _table(seconds: float, rows: tuple[int, int], growth: tuple[float, float]) -> Table:
    lines = tuple((seconds * factor, 1.5 * seconds * factor) for factor in growth)
    return Table(rows, (0, 4096), lines)


LLAMA_30B = ModelFacts(
    name="llama-30b",
    blocks=60,
    hidden_size=6656,
    block_bytes=1_070_000_000,
    block_parameters=535_000_000,
    kv_bytes_per_token=26_624,
    attention_size=6656,
    embed_bytes=426_000_000,
    head_bytes=426_000_000,
)
