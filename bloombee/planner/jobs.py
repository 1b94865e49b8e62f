"""What a simulation is made of, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    PassSeconds = Callable[[int, int, int], float]
    WireSeconds = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Station:
    """One server: `seconds(blocks, decode_rows, prefill_rows)` of a pass; KV in tokens x blocks.

    Passes are merged up to `merged_rows` rows (0: never).
    """

    name: str
    seconds: PassSeconds
    kv_token_blocks: int
    merged_rows: int = 0


@dataclass(frozen=True, slots=True)
class Wire:
    """One directed link: a message of (decode, prefill) rows occupies it, and arrives later."""

    name: str
    busy_s: WireSeconds
    latency_s: WireSeconds


@dataclass(frozen=True, slots=True)
class Course:
    """Stations in order, by index, the blocks that each computes, and `wires[i]` to the i-th.

    `entry` carries prompts to station 0; every further token comes over `wires[0]` from the
    last station. The client sees the first one `answer_s` after the last stage is done.
    """

    stations: tuple[int, ...]
    blocks: tuple[int, ...]
    entry: int
    wires: tuple[int, ...]
    answer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """`rows` sequences that enter together at `arrival_s`."""

    course: int
    rows: int
    prompt_tokens: int
    new_tokens: int
    chunk_tokens: int
    arrival_s: float = 0.0

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that it reserves, for every block of its course."""
        return self.rows * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True, slots=True)
class Busy:
    """For the picture: when which resource worked for which job."""

    resource: str
    job: int
    start_s: float
    end_s: float
    phase: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation showed.

    `tokens_per_s` is that of the middle half of all tokens, in which the pipeline is full;
    `peak_kv` in tokens x blocks by station; `mean_jobs` the average number of admitted jobs.
    """

    tokens: int
    end_s: float
    tokens_per_s: float
    first_token_s: tuple[float, ...]
    finished_s: tuple[float, ...]
    busy_share: dict[str, float]
    peak_kv: tuple[int, ...]
    mean_jobs: float
    trace: tuple[Busy, ...]
