"""Keys and values of all slots on CPU, in memory that is committed when touched.

One anonymous mapping holds `[2, L, S, K, N, E]`: keys then values, L blocks, S
slots of N tokens each. The mapping is far larger than the machine's memory may
be; the operating system backs a page of it when it is first written, and takes
it back on `release`. Never written or released memory reads as zeros, and that
is relied upon: what lies beyond a sequence's end must be finite.
"""

from __future__ import annotations

import mmap
import platform
import sys
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float

from bloombee.errors import SettingsError

LANE_TOKENS = 64
"""Attention reads whole lanes of tokens, so N is a multiple of it."""


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """L blocks x S slots x K heads x N tokens x E elements of `dtype`."""

    blocks: int
    slots: int
    kv_heads: int
    tokens: int
    head_size: int
    dtype: torch.dtype

    @property
    def slot_elements(self) -> int:
        """Elements between the same place of adjacent slots."""
        return self.kv_heads * self.tokens * self.head_size

    @property
    def total_bytes(self) -> int:
        """Size of the mapping (address space, not memory)."""
        return 2 * self.blocks * self.slots * self.slot_elements * self.dtype.itemsize


def lane_aligned(tokens: int) -> int:
    """`tokens` rounded up to whole lanes."""
    return -(-tokens // LANE_TOKENS) * LANE_TOKENS


class SlotRange:
    """A strided view of `rows` adjacent slots from `slot`, tokens `[low, low + width)`."""

    __slots__ = ("rows", "size", "start", "stride", "width")

    def __init__(self, shape: ArenaShape, slot: int, rows: int, low: int, width: int) -> None:
        self.rows = rows
        self.width = width
        self.size = (rows * shape.kv_heads, width, shape.head_size)
        self.stride = (shape.tokens * shape.head_size, shape.head_size, 1)
        self.start = slot * shape.slot_elements + low * shape.head_size


def slot_tokens(row_elements: int, max_length: int, dtype: torch.dtype) -> int:
    """Tokens of a slot that holds `max_length`: whole lanes and whole memory pages.

    `row_elements` are those of one token (K x E).
    """
    tokens = lane_aligned(max_length)
    while tokens * row_elements * dtype.itemsize % mmap.PAGESIZE:
        tokens += LANE_TOKENS
    return tokens


class Arena:
    """The mapping and its tensors.

    `flat_keys[l]` and `flat_values[l]` are one block's memory as `[S*K*N, E]` token
    rows; `key_base[l]`/`value_base[l]` say where it starts in `memory`, for strided views.
    """

    def __init__(self, shape: ArenaShape) -> None:
        """Map the memory. Raises SettingsError when the address space isn't granted."""
        self.shape = shape
        try:
            self._map = mmap.mmap(-1, shape.total_bytes, flags=_map_flags())
        except (OSError, OverflowError, ValueError) as error:
            raise SettingsError(
                f"can't map {shape.total_bytes >> 20} MiB of address space for KV ({error}); "
                "lower --kv-tokens or the longest session"
            ) from error
        # A huge page would commit 2 MiB for the first token of every slot.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=shape.dtype)
        s = shape
        self.tensor = self.memory.view(2, s.blocks, s.slots, s.kv_heads, s.tokens, s.head_size)
        rows = self.memory.view(2, s.blocks, -1, s.head_size)
        self.flat_keys = list(rows[0].unbind(0))
        self.flat_values = list(rows[1].unbind(0))
        block = s.slots * s.slot_elements
        self.key_base = [index * block for index in range(s.blocks)]
        self.value_base = [(s.blocks + index) * block for index in range(s.blocks)]

        self.nothing = torch.zeros((1, 1, 1), dtype=shape.dtype)

    def read(
        self, layer: int, where: SlotRange
    ) -> tuple[Float[torch.Tensor, "B W E"], Float[torch.Tensor, "B W E"]]:
        """Keys and values in place, B = rows x K."""
        size, stride, start = where.size, where.stride, where.start
        return (
            torch.as_strided(self.memory, size, stride, self.key_base[layer] + start),
            torch.as_strided(self.memory, size, stride, self.value_base[layer] + start),
        )

    def slot(self, slot: int) -> Float[torch.Tensor, "2 L K N E"]:
        """Keys and values of one slot on all blocks (a view)."""
        return self.tensor[:, :, slot]

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Zero tokens `[start, stop)` of a slot, so that nothing stale is ever read."""
        if start < stop:
            self.slot(slot)[..., start:stop, :].zero_()

    def release(self, slot: int, used_tokens: int) -> None:
        """Give a slot's memory back; it reads as zeros again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            self.clear(slot, 0, used_tokens)
            return
        size = self.shape.slot_elements * self.shape.dtype.itemsize
        for layer in range(2 * self.shape.blocks):
            start = (layer * self.shape.slots + slot) * size
            self._map.madvise(mmap.MADV_DONTNEED, start, size)


def map_slots(one: ArenaShape, slots: int) -> Arena:
    """An arena of up to `slots` of these, fewer where so much address space isn't granted.

    Raises SettingsError when not even one fits.
    """
    while slots > 1:
        try:
            return Arena(replace(one, slots=slots))
        except SettingsError:
            slots //= 2
    return Arena(one)


def _map_flags() -> int:
    """Private and not counted against the memory that may be promised.

    Python names MAP_NORESERVE from 3.12 on; this is its value on the processors we meet.
    """
    on_linux = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64")
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if on_linux else 0)
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
