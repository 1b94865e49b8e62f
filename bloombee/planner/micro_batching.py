"""How many micro-batches a batch decodes in, and how many parts a prompt is cut into.

A round is one token of every row. With G micro-batches of m rows it takes as long as the
busiest resource needs for G of them, or as one of them needs for the whole way round, if
that is longer: max(G x busiest(m), way(m)). Resources are stages, links, and machines, whose
cores all stages on them share. Times vary, so the way counts SLACK times: with
none to spare a resource would often wait. Of counts that are nearly as good the smallest wins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_ROWS = 4
"""Of a micro-batch: fewer cost more than they win."""
SLACK = 1.2
NEARLY = 1.05
HANDLING_S = 1e-3
"""What a pass costs a machine besides computing: reading, checking, sending."""
MOST_PARTS, LEAST_PART_TOKENS = 32, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """How long a pass of the stage takes: `first_s` for one row, `row_s` for each one more.

    It shares the `cores` of `machine` with other stages there; none are shared where that is
    empty. A device that plays a slower one computes in one part of its time in `pace`.
    """

    first_s: float
    row_s: float
    pace: float = 1.0
    machine: str = ""
    cores: int = 0

    def takes_s(self, rows: int) -> float:
        """How long a pass takes."""
        return self.first_s + (rows - 1) * self.row_s + HANDLING_S

    def computes_s(self, rows: int) -> float:
        """Processor time of a pass."""
        return (self.first_s + (rows - 1) * self.row_s) / self.pace + HANDLING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HopFacts:
    """The way to the next stage: seconds one way, bytes a second, bytes of a row as they travel."""

    alpha_s: float
    bytes_per_s: float
    row_bytes: float

    def takes_s(self, rows: int) -> float:
        """How long it is busy with so many rows."""
        return rows * self.row_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A route: its stages, the hops between them, and the seconds back to the first stage."""

    stages: tuple[StageFacts, ...]
    hops: tuple[HopFacts, ...]
    back_s: float = 0.0

    def busiest_s(self, rows: int) -> float:
        """What the busiest resource needs for so many rows."""
        machines: dict[tuple[str, int], float] = defaultdict(float)
        for stage in self.stages:
            if stage.machine and stage.cores:
                machines[stage.machine, stage.cores] += stage.computes_s(rows) / stage.cores
        stages = [stage.takes_s(rows) for stage in self.stages]
        return max(*stages, *(hop.takes_s(rows) for hop in self.hops), *machines.values(), 0.0)

    def way_s(self, rows: int) -> float:
        """The whole way round of so many rows."""
        hops = sum(hop.alpha_s + hop.takes_s(rows) for hop in self.hops)
        return sum(stage.takes_s(rows) for stage in self.stages) + hops + self.back_s


@dataclass(frozen=True, slots=True)
class Count:
    """How many, and why."""

    count: int
    reason: str


def usual_count(rows: int, stages: int) -> int:
    """How many micro-batches keep stages and links at work of which nothing is known."""
    return max(1, min(stages + 1, rows // LEAST_ROWS)) if stages > 1 else 1


def decode_count(rows: int, pipeline: Pipeline) -> Count:
    """How many micro-batches `rows` decode in on this route."""
    stages = len(pipeline.stages)
    most = max(1, min(2 * stages + 2, rows // LEAST_ROWS)) if stages > 1 else 1
    rounds = {count: round_s(rows, count, pipeline) for count in range(1, most + 1)}
    best_s = min(rounds.values())
    count = next(each for each, seconds in rounds.items() if seconds <= NEARLY * best_s)
    share = math.ceil(rows / count)
    return Count(
        count,
        f"a token of {rows} rows takes {rounds[count] * 1e3:.1f} ms so, {rounds[1] * 1e3:.1f} in "
        f"one; of {share} rows the way takes {pipeline.way_s(share) * 1e3:.1f} ms and the busiest "
        f"resource {pipeline.busiest_s(share) * 1e3:.1f}",
    )


def round_s(rows: int, count: int, pipeline: Pipeline) -> float:
    """One token of every row, in so many micro-batches."""
    share = math.ceil(rows / count)
    way_s = pipeline.way_s(share) * (SLACK if count > 1 else 1.0)
    return max(count * pipeline.busiest_s(share), way_s)


def prompt_parts(tokens: int, pipeline: Pipeline) -> Count:
    """How many parts a prompt of so many tokens is computed in; `row_s` is of a prompt's token.

    The first takes the whole way, the others follow as fast as the busiest resource lets them.
    """
    most = max(1, min(MOST_PARTS, tokens // LEAST_PART_TOKENS)) if len(pipeline.stages) > 1 else 1
    seconds = {count: _prompt_s(tokens, count, pipeline) for count in range(1, most + 1)}
    best_s = min(seconds.values())
    count = next(each for each, s in seconds.items() if s <= NEARLY * best_s)
    return Count(count, f"{tokens} tokens take {seconds[count]:.2f} s so, {seconds[1]:.2f} whole")


def _prompt_s(tokens: int, count: int, pipeline: Pipeline) -> float:
    share = math.ceil(tokens / count)
    return pipeline.way_s(share) + (count - 1) * pipeline.busiest_s(share)


def pipeline_of(
    stages: Sequence[StageFacts | None], hops: Sequence[HopFacts | None], back_s: float
) -> Pipeline | None:
    """A route of which enough is known to count by; None of any other."""
    known = [stage for stage in stages if stage is not None]
    ways = [hop for hop in hops if hop is not None]
    if len(known) < len(stages) or len(ways) < len(hops):
        return None
    return Pipeline(tuple(known), tuple(ways), back_s)
