"""What is asked of a plan: the work, the objective, and one way of cutting the work up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Number = TypeVar("Number", float, NDArray[np.float64])


class Objective(StrEnum):
    """What makes one plan better than another."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    FIRST_TOKEN = "first-token"
    COST = "cost"
    ENERGY = "energy"


class Head(StrEnum):
    """Who embeds, and applies norm, head and sampling: see DESIGN 4."""

    CLIENT = "client"
    SERVER = "server"


class Goal(StrEnum):
    """How latency and bottleneck make up the time of M micro-batches.

    `SUM`: one after the other through the pipeline, nothing overlaps. `FILL`: they follow
    each other once, fill + (M - 1) x bottleneck. `RING`: each enters again as soon as its
    token is there (no barrier), so a token of all M takes the longer of one way round and
    M times the bottleneck.
    """

    SUM = "sum"
    FILL = "fill"
    RING = "ring"

    def seconds(self, latency_s: Number, bottleneck_s: float, micro_batches: int) -> Number:
        """The time; grows with the latency and with the bottleneck."""
        if self is Goal.SUM:
            return latency_s
        if self is Goal.FILL:
            return latency_s + (micro_batches - 1) * bottleneck_s
        return np.maximum(latency_s, micro_batches * bottleneck_s)  # pyright: ignore[reportReturnType]  # a scalar stays one


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sequences of `prompt_tokens` and `new_tokens`, in candidate `batches`.

    Memory is planned for the full length, time for the context halfway through decoding.
    `count_prefill`: the prompt's share of a token's time counts in throughput; else only
    decoding. `micro_batches` are the candidates for sequences in one micro-batch of decode;
    empty means every power-of-two part of the batch. `chunk_tokens` are candidates for
    prompt tokens in one pass of prefill.
    """

    prompt_tokens: int = 128
    new_tokens: int = 128
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    micro_batches: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] = (128, 512, 2048)
    heads: tuple[Head, ...] = (Head.SERVER, Head.CLIENT)
    page_tokens: int = 64
    count_prefill: bool = False

    @property
    def full_tokens(self) -> int:
        """Length of a finished sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def usual_tokens(self) -> float:
        """Context at which decoding is timed."""
        return self.prompt_tokens + self.new_tokens / 2

    def micro_batches_of(self, batch: int) -> tuple[int, ...]:
        """Candidates for the sequences in one micro-batch, largest first."""
        if self.micro_batches:
            fitting = {min(size, batch) for size in self.micro_batches}
            return tuple(sorted(fitting, reverse=True))
        sizes: list[int] = []
        size = batch
        while size >= 1:
            sizes.append(size)
            if size == 1:
                break
            size = -(-size // 2)
        return tuple(sizes)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """One way of cutting a workload up: sequences at a time, in a micro-batch, tokens a chunk."""

    batch: int
    micro_batch: int
    chunk_tokens: int
    head: Head

    @property
    def micro_batches(self) -> int:
        """M of decoding."""
        return -(-self.batch // self.micro_batch)

    def chunks(self, workload: Workload, sequences: int) -> int:
        """Passes of prefill for that many prompts."""
        return -(-sequences * workload.prompt_tokens // self.chunk_tokens)
