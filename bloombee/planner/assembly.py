"""From a found route to its record: stages, hops, memory, and both phases' times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bloombee.core import Span
from bloombee.planner.costs import FIRST, LAST, MIDDLE, ONLY, Focus, price
from bloombee.planner.memory import BUFFERED_BLOCKS, Load
from bloombee.planner.plan import HopPlan, MemoryUse, RoutePlan, StagePlan
from bloombee.planner.workload import Head

if TYPE_CHECKING:
    from bloombee.core import PeerId
    from bloombee.planner.costs import Costs, Priced
    from bloombee.planner.memory import Residence
    from bloombee.planner.profiles import Cluster, Floats, ModelFacts
    from bloombee.planner.workload import Shape, Workload

    Route = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Assembler:
    """Makes records of routes over one cluster, model and workload."""

    model: ModelFacts
    cluster: Cluster
    workload: Workload

    def route(self, shape: Shape, route: Route, cap_s: float = float("inf")) -> RoutePlan:
        """The record of a route of (peer, blocks), with decode links busy for `cap_s` at most."""
        decoding = replace(self.workload, count_prefill=False)
        decode = price(self.model, self.cluster, decoding, shape, Focus.DECODE)
        chunk = price(self.model, self.cluster, self.workload, shape, Focus.PREFILL)
        hops = self._hops(shape, route, (decode.costs, chunk.costs), cap_s)
        stages = self._stages(shape, route, decode, chunk)
        ring = hops[1:] if shape.head is Head.SERVER else hops
        pre = hops
        return RoutePlan(
            shape,
            stages,
            hops,
            sum(s.decode_s for s in stages) + sum(h.decode_s for h in ring),
            max(*(s.decode_s for s in stages), *(h.decode_busy_s for h in ring)),
            sum(s.prefill_s for s in stages) + sum(h.prefill_s for h in pre),
            max(*(s.prefill_s for s in stages), *(h.prefill_busy_s for h in pre)),
            shape.chunks(self.workload, shape.batch),
        )

    def _stages(
        self, shape: Shape, route: Route, decode: Priced, chunk: Priced
    ) -> tuple[StagePlan, ...]:
        stages: list[StagePlan] = []
        start = 0
        for position, (peer, blocks) in enumerate(route):
            role = role_of(position, len(route))
            where = decode.residences[role if len(decode.residences) > 1 else 0]
            wanted = blocks * Load.of(self.model, self.workload, shape).batch_pages
            memory = self._memory(shape, peer, blocks, role, where)
            stages.append(
                StagePlan(
                    self.cluster.peers[peer].peer,
                    peer,
                    Span(start, start + blocks),
                    float(decode.costs.stage_s[role, peer, blocks]),
                    float(chunk.costs.stage_s[role, peer, blocks]),
                    int(where.kv_pages[peer, blocks]) / wanted,
                    int(where.streamed[peer, blocks]),
                    self._room_tokens(memory, blocks),
                    memory,
                    self.cluster.peers[peer].kind,
                )
            )
            start += blocks
        return tuple(stages)

    def _room_tokens(self, memory: MemoryUse, blocks: int) -> int:
        """Tokens of KV that fit beside the weights, as resident and offloaded as planned."""
        free = memory.device_bytes - memory.used_bytes
        held = memory.kv_bytes + memory.host_kv_bytes
        if memory.host_kv_bytes:
            free += memory.host_bytes - memory.host_kv_bytes - memory.host_weights_bytes
        return (free + held) // (blocks * self.model.kv_bytes_per_token)

    def _memory(
        self, shape: Shape, peer: int, blocks: int, role: int, where: Residence
    ) -> MemoryUse:
        machine, model = self.cluster.peers[peer], self.model
        load = Load.of(model, self.workload, shape)
        away, streamed = int(where.kv_pages[peer, blocks]), int(where.streamed[peer, blocks])
        ends = {FIRST: model.embed_bytes, LAST: model.head_bytes, ONLY: model.both_ends_bytes}
        from_disk = int(where.disk_bytes[peer, blocks])
        landing = min(BUFFERED_BLOCKS, blocks) * load.micro_pages * load.page_bytes if away else 0
        landing += min(BUFFERED_BLOCKS, streamed) * model.block_bytes
        return MemoryUse(
            weights_bytes=(blocks - streamed) * model.block_bytes,
            ends_bytes=ends.get(role, 0) if shape.head is Head.SERVER else 0,
            kv_bytes=(blocks * load.batch_pages - away) * load.page_bytes,
            buffer_bytes=landing,
            workspace_bytes=machine.workspace_bytes + machine.workspace_bytes_per_row * load.rows,
            device_bytes=machine.device_bytes,
            host_kv_bytes=away * load.page_bytes,
            host_weights_bytes=streamed * model.block_bytes - from_disk,
            host_bytes=machine.host_bytes,
            disk_weights_bytes=from_disk,
        )

    def _hops(
        self, shape: Shape, route: Route, costs: tuple[Costs, Costs], cap_s: float
    ) -> tuple[HopPlan, ...]:
        decode, chunk = costs
        peers = [peer for peer, _ in route]
        names = [self.cluster.peers[peer].peer for peer in peers]
        first, last = peers[0], peers[-1]
        ring = shape.head is Head.SERVER
        group = first if ring else 0
        hops = [
            self._hop(None, names[0], _enter(decode, group, first), _enter(chunk, 0, first), cap_s)
        ]
        for (p, q), (source, target) in zip(
            zip(peers, peers[1:], strict=False), zip(names, names[1:], strict=False), strict=True
        ):
            hops.append(self._hop(source, target, _hop(decode, p, q), _hop(chunk, p, q), cap_s))
        back = names[0] if ring else None
        closing = _leave(decode, group, last), _leave(chunk, 0, last)
        return (*hops, self._hop(names[-1], back, *closing, cap_s))

    def _hop(
        self,
        source: PeerId | None,
        target: PeerId | None,
        decode: tuple[Floats, Floats],
        chunk: tuple[Floats, Floats],
        cap_s: float,
    ) -> HopPlan:
        """The hop with its quickest codec among those busy for `cap_s` at most."""
        allowed = np.where(decode[1] <= cap_s, decode[0], np.inf)
        if np.isinf(allowed).all():
            allowed = decode[0]
        codec = int(allowed.argmin())
        return HopPlan(
            source,
            target,
            self.cluster.codecs[codec].name,
            float(decode[0][codec]),
            float(decode[1][codec]),
            float(chunk[0][codec]),
            float(chunk[1][codec]),
        )


def role_of(position: int, stages: int) -> int:
    """The role of a stage in a route of that many."""
    if stages == 1:
        return ONLY
    return FIRST if position == 0 else LAST if position == stages - 1 else MIDDLE


def _enter(costs: Costs, group: int, peer: int) -> tuple[Floats, Floats]:
    return costs.enter_s[:, group, peer], costs.enter_busy_s[:, group, peer]


def _leave(costs: Costs, group: int, peer: int) -> tuple[Floats, Floats]:
    return costs.leave_s[:, group, peer], costs.leave_busy_s[:, group, peer]


def _hop(costs: Costs, source: int, target: int) -> tuple[Floats, Floats]:
    return costs.hop_s[:, source, target], costs.hop_busy_s[:, source, target]
