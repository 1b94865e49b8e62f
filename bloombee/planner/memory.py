"""What lies where on each peer: resident and streamed blocks, KV on the device and on the host.

All bytes are whole: KV goes by pages of one block, weights by blocks. For every peer and
every span length the placement is the one whose transfers in a decode pass are shortest,
with as few streamed blocks as that allows. KV on the host is read once a token and counted
against host memory; streamed blocks come from the host while it has room, else from disk,
in every pass. Both land in buffers on the device for two blocks, so that one arrives while
the other is in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bloombee.planner.profiles import ModelFacts, PeerProfile
    from bloombee.planner.workload import Shape, Workload

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

BUFFERED_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What a shape makes every peer hold: KV pages of one block, and rows of the largest pass.

    `micro_share` is the part of the batch in one micro-batch, `usual_share` the part of its
    full context that a sequence has when it is timed.
    """

    batch_pages: int
    micro_pages: int
    page_bytes: int
    rows: int
    micro_share: float
    usual_share: float

    @classmethod
    def of(cls, model: ModelFacts, workload: Workload, shape: Shape) -> Load:
        """The load of `shape`; a partly filled page counts whole."""
        pages = -(-workload.full_tokens // workload.page_tokens)
        return cls(
            batch_pages=shape.batch * pages,
            micro_pages=shape.micro_batch * pages,
            page_bytes=workload.page_tokens * model.kv_bytes_per_token,
            rows=max(shape.micro_batch, shape.chunk_tokens),
            micro_share=shape.micro_batch / shape.batch,
            usual_share=workload.usual_tokens / (pages * workload.page_tokens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Columns `[N, 1]` of what the peers have, for arithmetic over peers at once."""

    device_bytes: Ints
    workspace_bytes: Ints
    workspace_bytes_per_row: Ints
    host_bytes: Ints
    host_rate: Floats
    disk_rate: Floats
    streams: Bools

    @classmethod
    def of(cls, peers: Sequence[PeerProfile]) -> Memory:
        """The columns of `peers`."""

        def whole(values: list[int]) -> Ints:
            return np.array(values, dtype=np.int64)[:, None]

        def rate(values: list[float]) -> Floats:
            return np.array(values, dtype=np.float64)[:, None]

        return cls(
            whole([peer.device_bytes for peer in peers]),
            whole([peer.workspace_bytes for peer in peers]),
            whole([peer.workspace_bytes_per_row for peer in peers]),
            whole([peer.host_bytes for peer in peers]),
            rate([peer.host_device_bytes_per_s for peer in peers]),
            rate([peer.disk_bytes_per_s for peer in peers]),
            np.array([[peer.streams_weights] for peer in peers], dtype=np.bool_),
        )

    def take(self, rows: Ints) -> Memory:
        """The columns of some peers."""
        return Memory(
            self.device_bytes[rows],
            self.workspace_bytes[rows],
            self.workspace_bytes_per_row[rows],
            self.host_bytes[rows],
            self.host_rate[rows],
            self.disk_rate[rows],
            self.streams[rows],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Residence:
    """Where things lie, `[N, L + 1]` by peer and span length.

    `transfer_s` is that of a decode pass, infinite where the span doesn't fit.
    `kv_pages` of the span's KV are on the host, `streamed` of its blocks come each pass,
    `disk_bytes` of those from disk.
    """

    transfer_s: Floats
    kv_pages: Ints
    streamed: Ints
    disk_bytes: Ints


def residence(model: ModelFacts, memory: Memory, load: Load, ends_bytes: int) -> Residence:
    """The best residence of every span length on every peer.

    `ends_bytes` is what the stage holds besides its blocks. Span length 0 always fits.
    """
    blocks = np.arange(model.blocks + 1, dtype=np.int64)[None, :]
    resident = _place(model, memory, load, ends_bytes, blocks, np.zeros(1, dtype=np.int64))
    hopeful = memory.streams & (memory.host_rate > 0)
    strained = (hopeful & (resident.transfer_s > 0)).any(axis=1)
    if not strained.any():
        return resident
    rows = np.flatnonzero(strained)
    every = np.arange(model.blocks + 1, dtype=np.int64)[:, None, None]
    choices = _place(model, memory.take(rows), load, ends_bytes, blocks, every)
    return _merge(resident, rows, choices)


def _merge(resident: Residence, rows: Ints, choices: Residence) -> Residence:
    """Put the best of `choices` `[S, n, L + 1]` in the place of some peers' rows."""
    best = choices.transfer_s.argmin(axis=0)[None]
    transfer, pages = resident.transfer_s.copy(), resident.kv_pages.copy()
    streamed, disk = resident.streamed.copy(), resident.disk_bytes.copy()
    transfer[rows] = np.take_along_axis(choices.transfer_s, best, axis=0)[0]
    pages[rows] = np.take_along_axis(choices.kv_pages, best, axis=0)[0]
    streamed[rows] = np.take_along_axis(choices.streamed, best, axis=0)[0]
    disk[rows] = np.take_along_axis(choices.disk_bytes, best, axis=0)[0]
    return Residence(transfer, pages, streamed, disk)


def _place(
    model: ModelFacts, memory: Memory, load: Load, ends_bytes: int, blocks: Ints, streamed: Ints
) -> Residence:
    """The residence of `blocks` blocks with `streamed` of them streamed, all broadcast."""
    held = blocks - streamed + np.minimum(streamed, BUFFERED_BLOCKS)
    room = memory.device_bytes - memory.workspace_bytes - ends_bytes - held * model.block_bytes
    room = (room - memory.workspace_bytes_per_row * load.rows) // load.page_bytes
    wanted = blocks * load.batch_pages
    landing = np.minimum(blocks, BUFFERED_BLOCKS) * load.micro_pages
    away = np.where(wanted <= np.maximum(room, 0), 0, wanted - room + landing)
    away_bytes = away * load.page_bytes
    streamed_bytes = streamed * model.block_bytes
    from_disk = np.maximum(0, streamed_bytes - np.maximum(0, memory.host_bytes - away_bytes))
    moves = (away > 0) | (streamed > 0)
    fits = (room >= 0) & ((away == 0) | ((room >= landing) & (away_bytes <= memory.host_bytes)))
    fits &= (streamed <= blocks) & (memory.streams | (streamed == 0))
    fits &= (memory.host_rate > 0) | ~moves
    fits &= (memory.disk_rate > 0) | (from_disk == 0)
    fits |= (blocks == 0) & (streamed == 0)
    read = away_bytes * (load.micro_share * load.usual_share)
    transfer = transfer_seconds(memory, read + streamed_bytes, from_disk)
    transfer = np.where(fits, transfer, np.inf)
    return Residence(transfer, away, np.broadcast_to(streamed, transfer.shape), from_disk)


def transfer_seconds(memory: Memory, bus_bytes: Floats, disk_bytes: Ints) -> Floats:
    """Time to bring so much over the bus, part of it from disk at the same time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bus = np.where(bus_bytes > 0, bus_bytes / memory.host_rate, 0.0)
        disk = np.where(disk_bytes > 0, disk_bytes / memory.disk_rate, 0.0)
    return np.maximum(bus, disk)
