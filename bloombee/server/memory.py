"""How many blocks and KV tokens fit, worked out before anything is loaded.

The rule: a reserve of `RESERVE_BYTES` and a tenth of the free memory stays free
(activations, buffers, the interpreter). Blocks come first: as many as asked for,
or as many as fit beside room for `ROOM_TOKENS` of KV. With `auto`, KV then gets
all that is left on an accelerator and half of it on a CPU, whose memory is
shared with the rest of the machine; `MOST_TOKENS` at most. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloombee.errors import SettingsError

RESERVE_BYTES = 256 << 20
RESERVE_SHARE = 10
ROOM_TOKENS = 16_384
MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """`free_bytes` of a device, and what one block and one token of KV on it take.

    `largest_block_bytes` stands for each block, so that any span of that many fits.
    """

    device: str
    free_bytes: int
    largest_block_bytes: int
    kv_bytes_per_token_and_block: int

    @property
    def usable_bytes(self) -> int:
        """What blocks and KV may take together."""
        return max(0, self.free_bytes - RESERVE_BYTES - self.free_bytes // RESERVE_SHARE)

    @property
    def is_shared(self) -> bool:
        """Whether other programs live in the same memory."""
        return self.device == "cpu"

    def bytes_of(self, blocks: int, kv_tokens: int) -> int:
        """What `blocks` take with KV of `kv_tokens`."""
        return blocks * (self.largest_block_bytes + kv_tokens * self.kv_bytes_per_token_and_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a server is going to take."""

    device: str
    blocks: int
    weight_bytes: int
    kv_tokens: int
    kv_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"memory on {self.device}: {self.blocks} blocks {size(self.weight_bytes)}, "
            f"KV of {self.kv_tokens:,} tokens {size(self.kv_bytes)}, "
            f"{size(self.free_bytes)} free before"
        )


def plan_memory(
    memory: Memory, *, num_blocks: int, wanted_blocks: int | None, kv_tokens: int | None
) -> MemoryPlan:
    """Blocks and KV of a server of a model with `num_blocks`; None means: as many as fit.

    Raises SettingsError when not even that fits, naming what would, and for more
    blocks than the model has.
    """
    if wanted_blocks is not None and wanted_blocks > num_blocks:
        raise SettingsError(
            f"--num-blocks {wanted_blocks}: the model has {num_blocks}; ask for at most those"
        )
    room = kv_tokens or ROOM_TOKENS
    if wanted_blocks is None:
        blocks = min(num_blocks, memory.usable_bytes // memory.bytes_of(1, room))
        if blocks < 1:
            raise SettingsError(_nothing_fits(memory, room))
    else:
        blocks = wanted_blocks
        if memory.bytes_of(blocks, kv_tokens or 1) > memory.usable_bytes:
            raise SettingsError(_too_much(memory, blocks, kv_tokens))
    tokens = kv_tokens or _auto_tokens(memory, blocks)
    return MemoryPlan(
        device=memory.device,
        blocks=blocks,
        weight_bytes=blocks * memory.largest_block_bytes,
        kv_tokens=tokens,
        kv_bytes=tokens * blocks * memory.kv_bytes_per_token_and_block,
        free_bytes=memory.free_bytes,
    )


def _auto_tokens(memory: Memory, blocks: int) -> int:
    left = memory.usable_bytes - blocks * memory.largest_block_bytes
    per_token = blocks * memory.kv_bytes_per_token_and_block
    fit = left // per_token
    share = max(fit // 2, min(fit, ROOM_TOKENS)) if memory.is_shared else fit
    return max(1, min(share, MOST_TOKENS))


def _nothing_fits(memory: Memory, room: int) -> str:
    return (
        f"not one block fits on {memory.device}: it takes {size(memory.largest_block_bytes)} "
        f"and KV of {room:,} tokens {size(room * memory.kv_bytes_per_token_and_block)}, of "
        f"{size(memory.usable_bytes)} usable; free memory, or set a smaller --kv-tokens or --dtype"
    )


def _too_much(memory: Memory, blocks: int, kv_tokens: int | None) -> str:
    fit = memory.usable_bytes // memory.bytes_of(1, kv_tokens or ROOM_TOKENS)
    mend = f"--num-blocks {fit} fits" if fit else "free memory, or set a smaller --kv-tokens"
    kv = f" and KV of {kv_tokens:,} tokens" if kv_tokens else ""
    return (
        f"{blocks} blocks{kv} take {size(memory.bytes_of(blocks, kv_tokens or 1))} on "
        f"{memory.device}, {size(memory.usable_bytes)} are usable: {mend}"
    )


def size(count_bytes: int) -> str:
    """Bytes for people: `1.5 GB`."""
    value = float(count_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
