"""Block times that nobody measured, from bytes and operations.

A pass through a block takes the longer of reading what it reads (weights, and the KV of its
sequences) at the device's memory bandwidth, and of computing what it computes at its rate
of operations, each times an efficiency. It is a model, not a measurement: `bloombee-profile`
tables replace it wherever they exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.planner.profiles import TimeTable

if TYPE_CHECKING:
    from bloombee.planner.profiles import ModelFacts

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
CONTEXTS = (0, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Silicon:
    """A device's rates: memory bandwidth, dense operations of the weights' type, efficiencies."""

    bytes_per_s: float
    flops_per_s: float
    bandwidth_efficiency: float
    compute_efficiency: float

    def seconds(self, read_bytes: float, operations: float) -> float:
        """The longer of reading and computing."""
        reading = read_bytes / (self.bytes_per_s * self.bandwidth_efficiency)
        computing = operations / (self.flops_per_s * self.compute_efficiency)
        return max(reading, computing)


def decode_table(model: ModelFacts, silicon: Silicon) -> TimeTable:
    """One new token in each of `rows` sequences: the weights are read once, KV for each."""

    def seconds(rows: int, context: int) -> float:
        read = model.block_bytes + rows * context * model.kv_bytes_per_token
        return silicon.seconds(read, rows * _operations(model, context))

    return _table(DECODE_ROWS, seconds)


def prefill_table(model: ModelFacts, silicon: Silicon) -> TimeTable:
    """`rows` prompt tokens in one pass, each attending to `context` tokens on average."""

    def seconds(rows: int, context: int) -> float:
        read = model.block_bytes + (rows + context) * model.kv_bytes_per_token
        return silicon.seconds(read, rows * _operations(model, context))

    return _table(PREFILL_ROWS, seconds)


def head_table(model: ModelFacts, silicon: Silicon) -> TimeTable:
    """Norm, head and sampling for `rows` tokens."""
    values = [
        (silicon.seconds(model.head_bytes, rows * float(model.head_bytes)),) for rows in DECODE_ROWS
    ]
    return TimeTable(DECODE_ROWS, (0,), tuple(values))


def _operations(model: ModelFacts, context: int) -> float:
    """Multiply and add with every weight; scores and sums over the context."""
    return 2.0 * model.block_parameters + 4.0 * context * model.attention_size


def _table(rows: tuple[int, ...], seconds: Seconds) -> TimeTable:
    lines = tuple(tuple(seconds(count, context) for context in CONTEXTS) for count in rows)
    return TimeTable(rows, CONTEXTS, lines)


if TYPE_CHECKING:
    from collections.abc import Callable

    Seconds = Callable[[int, int], float]
