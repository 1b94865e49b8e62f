"""A plan as a record: routes, their stages and hops, and what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bloombee.planner.workload import Goal, Shape

if TYPE_CHECKING:
    from bloombee.core import PeerId, Span


class Constraint(StrEnum):
    """What can make planning impossible."""

    DEVICE_MEMORY = "device memory"
    KV_MEMORY = "memory for KV"
    LINKS = "links"
    MOST_PEERS = "number of peers"
    NO_PEERS = "no peers"


@dataclass(frozen=True, slots=True)
class Infeasible:
    """There is no plan: which constraint fails, and one line that says how far."""

    constraint: Constraint
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one peer's device and host, planned for full-length sequences."""

    weights_bytes: int
    ends_bytes: int
    kv_bytes: int
    buffer_bytes: int
    workspace_bytes: int
    device_bytes: int
    host_kv_bytes: int
    host_weights_bytes: int
    host_bytes: int
    disk_weights_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes on the device, everything together."""
        ends = self.weights_bytes + self.ends_bytes
        return ends + self.kv_bytes + self.buffer_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: seconds of a pass of one decode micro-batch and of one prefill chunk.

    `kv_offload` is alpha, the share of the span's KV that lies on the host;
    `kv_room_tokens` is how many tokens of KV fit beside the weights, all tiers together.
    """

    peer: PeerId
    index: int
    span: Span
    decode_s: float
    prefill_s: float
    kv_offload: float
    streamed_blocks: int
    kv_room_tokens: int
    memory: MemoryUse
    kind: str = ""


@dataclass(frozen=True, slots=True)
class HopPlan:
    """One directed link of the way round; None is the client. `busy_s` of it can't be shared."""

    source: PeerId | None
    target: PeerId | None
    codec: str
    decode_s: float
    decode_busy_s: float
    prefill_s: float
    prefill_busy_s: float


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """One replica. `hops[i]` precedes stage i; the last closes the way round.

    With the head at the servers the last hop goes from the last stage to the first and
    there is none before stage 0: `hops[0]` is then the client's prompt, of prefill only.
    """

    shape: Shape
    stages: tuple[StagePlan, ...]
    hops: tuple[HopPlan, ...]
    decode_latency_s: float
    decode_bottleneck_s: float
    prefill_latency_s: float
    prefill_bottleneck_s: float
    prefill_chunks: int

    @property
    def token_s(self) -> float:
        """Time in which every sequence of the batch gets one token, without a barrier."""
        return float(
            Goal.RING.seconds(
                self.decode_latency_s, self.decode_bottleneck_s, self.shape.micro_batches
            )
        )

    @property
    def tokens_per_s(self) -> float:
        """Decode tokens a second of the whole batch."""
        return self.shape.batch / self.token_s

    @property
    def first_token_s(self) -> float:
        """Until the last prompt of the batch has its first token: fill + (M - 1) x bottleneck."""
        return float(
            Goal.FILL.seconds(
                self.prefill_latency_s, self.prefill_bottleneck_s, self.prefill_chunks
            )
        )

    @property
    def bottleneck(self) -> str:
        """The busiest resource of decoding, or the way round where nothing is busy all the time."""
        if self.decode_latency_s > self.decode_bottleneck_s * self.shape.micro_batches:
            return "latency of the whole way round"
        stages = [(stage.decode_s, f"stage {stage.span} at {stage.peer}") for stage in self.stages]
        hops = [(hop.decode_busy_s, f"link {hop_name(hop)}") for hop in self.hops]
        return max(stages + hops)[1]


def hop_name(hop: HopPlan) -> str:
    """`a -> b`, with the client by that name."""
    return f"{hop.source or 'client'} -> {hop.target or 'client'}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Disjoint routes that serve side by side, with what they cost together.

    `tokens_per_dollar` and `tokens_per_joule` are None where the price or the watts of a used
    peer aren't known; `dollars_per_s` and `watts` are 0 then.
    `score` is what the objective minimises: seconds, seconds a token, dollars or joules a token.
    """

    routes: tuple[RoutePlan, ...]
    score: float
    tokens_per_s: float
    first_token_s: float
    dollars_per_s: float
    watts: float

    @property
    def tokens_per_dollar(self) -> float | None:
        """D = R H / (C + k P), or R over the rent."""
        return self.tokens_per_s / self.dollars_per_s if self.dollars_per_s else None

    @property
    def tokens_per_joule(self) -> float | None:
        """E = R / P over the declared watts of the used peers."""
        return self.tokens_per_s / self.watts if self.watts else None

    @property
    def peers(self) -> tuple[int, ...]:
        """Indexes of the used peers."""
        return tuple(stage.index for route in self.routes for stage in route.stages)
