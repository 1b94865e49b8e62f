"""What the planner knows: the model, the peers, the links between them, the codecs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bloombee.core import PeerId

    Floats = NDArray[np.float64]

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model. All blocks are alike; `kv_bytes_per_token` is that of one block.

    `attention_size` is query heads x head size; `embed_bytes` and `head_bytes` are what the
    first stage and the last hold more when the servers keep the head (`tied`: the same bytes).
    """

    name: str
    blocks: int
    hidden_size: int
    block_bytes: int
    block_parameters: int
    kv_bytes_per_token: int
    attention_size: int
    embed_bytes: int
    head_bytes: int
    tied: bool = False
    wire_bytes_per_value: int = 2

    @property
    def row_bytes(self) -> int:
        """Bytes on the wire of the hidden state of one token, before any codec."""
        return self.hidden_size * self.wire_bytes_per_value

    @property
    def both_ends_bytes(self) -> int:
        """What a stage that is first and last holds besides blocks."""
        return max(self.embed_bytes, self.head_bytes) if self.tied else sum(self._ends)

    @property
    def _ends(self) -> tuple[int, int]:
        return self.embed_bytes, self.head_bytes


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Seconds of one pass through one block, by new rows in the pass and context in tokens.

    Both axes ascend. Between the points the table is linear, and beyond them it goes on
    with the slope of the last two. Raises ValueError when the axes and values don't match.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or not self.contexts or len(self.seconds) != len(self.rows):
            raise ValueError("a time table needs one line of seconds for each count of rows")
        if any(len(line) != len(self.contexts) for line in self.seconds):
            raise ValueError("a time table needs one value for each context in each line")
        for axis in (self.rows, self.contexts):
            if any(left >= right for left, right in zip(axis, axis[1:], strict=False)):
                raise ValueError(f"the axes of a time table ascend, got {axis}")
        if any(second < 0 for line in self.seconds for second in line):
            raise ValueError("a time table holds no negative seconds")

    def at(self, rows: float, context: float) -> float:
        """Seconds for that many rows at that context; never negative."""
        row, row_share = _position(self.rows, rows)
        column, column_share = _position(self.contexts, context)
        lines = self.seconds[row : row + 2]
        ends = [_between(line, column, column_share) for line in lines]
        return max(0.0, _between(ends, 0, row_share))

    def scaled(self, factor: float) -> TimeTable:
        """The same table on a machine that takes `factor` times as long."""
        seconds = tuple(tuple(value * factor for value in line) for line in self.seconds)
        return TimeTable(self.rows, self.contexts, seconds)

    @classmethod
    def flat(cls, seconds: float) -> TimeTable:
        """The same time whatever the rows and the context."""
        return cls((1,), (0,), ((seconds,),))


def _position(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of the axis to read from, and how far into it (or beyond) the value lies."""
    if len(axis) == 1:
        return 0, 0.0
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def _between(values: Sequence[float], index: int, share: float) -> float:
    if not share:
        return values[index]
    return values[index] + (values[index + 1] - values[index]) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProfile:
    """One machine. `decode` takes one row a sequence, `prefill` a chunk of prompt tokens.

    `head` is the time of norm, head and sampling by rows. `pass_s` is what every pass
    costs besides its blocks. `workspace_bytes_per_row` counts rows of the largest pass.
    With `overlaps` a pass computes while KV and weights of the next come from the host;
    without, it waits for them. `purchase` is in dollars, `price_per_hour` too.
    """

    peer: PeerId
    device_bytes: int
    decode: TimeTable
    prefill: TimeTable
    head: TimeTable = TimeTable.flat(0.0)
    pass_s: float = 0.0
    workspace_bytes: int = 0
    workspace_bytes_per_row: int = 0
    host_bytes: int = 0
    host_device_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    overlaps: bool = True
    streams_weights: bool = True
    price_per_hour: float = 0.0
    purchase: float = 0.0
    watts: float = 0.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Codec:
    """How hidden states travel: size as a share of raw, speeds in raw bytes a second."""

    name: str
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


RAW = Codec("raw", 1.0, float("inf"), float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """The alpha-beta model of every directed link; the last row and column are the client.

    `latency_s[i, j]` is alpha, `bytes_per_s[i, j]` beta; a rate of 0 means no link. Raises
    ValueError when the matrices aren't square and alike.
    """

    latency_s: Floats
    bytes_per_s: Floats

    def __post_init__(self) -> None:
        shape = self.latency_s.shape
        if len(shape) != 2 or shape[0] != shape[1] or self.bytes_per_s.shape != shape:
            raise ValueError("a network is two square matrices of one size")

    def __len__(self) -> int:
        return len(self.latency_s)

    def seconds(self, payload_bytes: float) -> tuple[Floats, Floats]:
        """Latency and occupancy of every link for one message of that size."""
        with np.errstate(divide="ignore", invalid="ignore"):
            busy = np.where(self.bytes_per_s > 0, payload_bytes / self.bytes_per_s, np.inf)
        return self.latency_s + busy, busy

    def take(self, peers: Sequence[int]) -> Network:
        """The network of only these peers, in this order, and the client."""
        kept = [*peers, len(self) - 1]
        grid = np.ix_(kept, kept)
        return Network(self.latency_s[grid], self.bytes_per_s[grid])


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Everything there is to plan with; `peers[i]` is node i of `network`.

    `client_head` is the client's time for norm, head and sampling. Prices of energy and
    lifetime turn a purchase price and watts into dollars. Raises ValueError when network
    and peers don't match.
    """

    peers: tuple[PeerProfile, ...]
    network: Network
    codecs: tuple[Codec, ...] = (RAW,)
    client_head: TimeTable = TimeTable.flat(0.0)
    dollars_per_kwh: float = 0.15
    lifetime_s: float = 3 * 365 * 24 * 3600.0

    def __post_init__(self) -> None:
        if len(self.network) != len(self.peers) + 1:
            raise ValueError(
                f"{len(self.peers)} peers and a client need a network of {len(self.peers) + 1} "
                f"nodes, got {len(self.network)}"
            )
        if not self.codecs:
            raise ValueError("a cluster needs at least one codec; RAW is one")

    def take(self, peers: Sequence[int]) -> Cluster:
        """The cluster of only these peers, in this order."""
        return Cluster(
            tuple(self.peers[index] for index in peers),
            self.network.take(peers),
            self.codecs,
            self.client_head,
            self.dollars_per_kwh,
            self.lifetime_s,
        )

    def dollars_per_s(self, index: int) -> float:
        """What a second of that peer costs: its rent, or (C + k P) / H of its purchase."""
        peer = self.peers[index]
        if peer.price_per_hour:
            return peer.price_per_hour / 3600
        return peer.purchase / self.lifetime_s + peer.watts * self.dollars_per_kwh / JOULES_PER_KWH
