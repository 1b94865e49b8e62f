"""How many blocks and KV tokens fit, worked out before anything is loaded.

The rule: a reserve of `RESERVE_BYTES` and a tenth of the free memory stays free
(activations, buffers, the interpreter). Blocks come first: as many as asked for,
or as many as fit beside room for `ROOM_TOKENS` of KV. The server of the first block holds the
embeddings as well, that of the last final norm and head: until it is known which blocks it
gets, room for the larger of these is kept. With `auto`, KV then gets
all that is left on an accelerator and half of it on a CPU, whose memory is
shared with the rest of the machine; `MOST_TOKENS` at most. Each token of KV comes with
a row of the journal, which lies on the host: on a CPU that is the same memory, beside
an accelerator it is counted against the host's. KV of parked sessions lies on the
host too, and takes at most what is left there beside the journals of those sessions.
Prompts that are kept for later sessions get of the rest; with `auto` a quarter of it,
and of the KV's size, at most.
Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloombee.core import Span
from bloombee.errors import SettingsError

RESERVE_BYTES = 256 << 20
RESERVE_SHARE = 10
PREFIX_SHARE = 4
ROOM_TOKENS = 16_384
MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Ends:
    """What embeddings, final norm and head take beside blocks, of a model of `num_blocks`.

    `both_bytes` may be less than the sum: tied weights are one.
    """

    num_blocks: int = 0
    first_bytes: int = 0
    last_bytes: int = 0
    both_bytes: int = 0

    def beside(self, blocks: int) -> int:
        """What any span of so many blocks may need beside them."""
        if blocks == self.num_blocks:
            return self.both_bytes
        return max(self.first_bytes, self.last_bytes)

    def at(self, span: Span) -> Ends:
        """What `span` needs, whichever its length."""
        first, last = span.start == 0, span.end == self.num_blocks
        needed = (0, self.first_bytes, self.last_bytes, self.both_bytes)[first + 2 * last]
        return Ends(self.num_blocks, needed, needed, needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """`free_bytes` of a device, and what one block and one token of KV on it take.

    `largest_block_bytes` stands for each block, so that any span of that many fits; `ends` is
    what it may need beside them.
    `journal_bytes_per_token` is a row as it travels; the journal lies on the host, of
    which `host_free_bytes` are free.
    """

    device: str
    free_bytes: int
    host_free_bytes: int
    largest_block_bytes: int
    kv_bytes_per_token_and_block: int
    journal_bytes_per_token: int
    ends: Ends = Ends()

    @property
    def usable_bytes(self) -> int:
        """What blocks, KV and all that lies on the device may take together."""
        return _usable(self.free_bytes)

    @property
    def usable_host_bytes(self) -> int:
        """What lies on the host may take together; on a CPU the same memory."""
        return self.usable_bytes if self.is_shared else _usable(self.host_free_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether the device's memory is the host's, in which other programs live."""
        return self.device == "cpu"

    def bytes_per_token(self, blocks: int) -> int:
        """What one token of KV takes on the device, on so many blocks."""
        journal = self.journal_bytes_per_token if self.is_shared else 0
        return blocks * self.kv_bytes_per_token_and_block + journal

    def bytes_of(self, blocks: int, kv_tokens: int) -> int:
        """What `blocks` take on the device with the ends and KV of `kv_tokens`."""
        kv = kv_tokens * self.bytes_per_token(blocks)
        return self.ends.beside(blocks) + blocks * self.largest_block_bytes + kv

    def blocks_with(self, kv_tokens: int, num_blocks: int) -> int:
        """How many of a model's blocks fit beside KV of `kv_tokens`."""
        each = self.largest_block_bytes + kv_tokens * self.kv_bytes_per_token_and_block
        left = self.usable_bytes - (self.bytes_of(1, kv_tokens) - each)
        fit = max(0, left // each)
        if fit >= num_blocks:  # with all blocks come both ends
            all_fit = self.bytes_of(num_blocks, kv_tokens) <= self.usable_bytes
            return num_blocks if all_fit else num_blocks - 1
        return fit

    def host_left_bytes(self, blocks: int, kv_tokens: int) -> int:
        """What is left on the host beside blocks, KV and journal, as far as these lie there."""
        taken = self.bytes_of(blocks, kv_tokens)
        if not self.is_shared:
            taken = kv_tokens * self.journal_bytes_per_token
        return max(0, self.usable_host_bytes - taken)

    def park_room_bytes(self, blocks: int, kv_tokens: int) -> int:
        """For KV that is set aside on the host: each token of it keeps its row of the journal."""
        kv = blocks * self.kv_bytes_per_token_and_block
        left = self.host_left_bytes(blocks, kv_tokens)
        return left * kv // (kv + self.journal_bytes_per_token)

    def prefix_room_bytes(self, blocks: int, kv_tokens: int, park_bytes: int) -> int:
        """For prompts that are kept, beside `park_bytes` of KV set aside and its journal."""
        kv = blocks * self.kv_bytes_per_token_and_block
        parked = park_bytes * (kv + self.journal_bytes_per_token) // kv
        return max(0, self.host_left_bytes(blocks, kv_tokens) - parked)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a server is going to take, at most: all but blocks and KV grow with use."""

    device: str
    blocks: int
    weight_bytes: int
    ends_bytes: int
    kv_tokens: int
    kv_bytes: int
    journal_bytes: int
    park_bytes: int
    prefix_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        ends = f"ends of the model {size(self.ends_bytes)}, " if self.ends_bytes else ""
        on_host = (
            f"{'' if self.device == 'cpu' else 'on the host '}journal up to "
            f"{size(self.journal_bytes)}, parked sessions up to {size(self.park_bytes)} "
            f"and kept prompts up to {size(self.prefix_bytes)}"
        )
        return (
            f"memory on {self.device}: {self.blocks} blocks {size(self.weight_bytes)}, {ends}"
            f"KV of {self.kv_tokens:,} tokens {size(self.kv_bytes)}, {on_host}, "
            f"{size(self.free_bytes)} free before"
        )


def plan_memory(
    memory: Memory,
    *,
    num_blocks: int,
    wanted_blocks: int | None,
    kv_tokens: int | None,
    park_bytes: int = 0,
    prefix_bytes: int | None = 0,
) -> MemoryPlan:
    """Blocks and KV of a server of a model with `num_blocks`; None means: as many as fit.

    Of `park_bytes` for parked sessions, then of `prefix_bytes` for kept prompts, it takes
    what is left of the host.
    Raises SettingsError when not even that fits, naming what would, and for more
    blocks than the model has.
    """
    if wanted_blocks is not None and wanted_blocks > num_blocks:
        raise SettingsError(
            f"--num-blocks {wanted_blocks}: the model has {num_blocks}; ask for at most those"
        )
    room = kv_tokens or ROOM_TOKENS
    if wanted_blocks is None:
        blocks = memory.blocks_with(room, num_blocks)
        if blocks < 1:
            raise SettingsError(_nothing_fits(memory, room))
    else:
        blocks = wanted_blocks
        if memory.bytes_of(blocks, kv_tokens or 1) > memory.usable_bytes:
            raise SettingsError(_too_much(memory, blocks, kv_tokens, num_blocks))
    tokens = kv_tokens or _auto_tokens(memory, blocks)
    if tokens * memory.journal_bytes_per_token > memory.usable_host_bytes:
        raise SettingsError(_no_room_for_journal(memory, tokens))
    park_bytes = min(park_bytes, memory.park_room_bytes(blocks, tokens))
    kv_bytes = tokens * blocks * memory.kv_bytes_per_token_and_block
    prefix_room = memory.prefix_room_bytes(blocks, tokens, park_bytes)
    if prefix_bytes is None:
        prefix_bytes = min(kv_bytes, prefix_room) // PREFIX_SHARE
    return MemoryPlan(
        device=memory.device,
        blocks=blocks,
        weight_bytes=blocks * memory.largest_block_bytes,
        ends_bytes=memory.ends.beside(blocks),
        kv_tokens=tokens,
        kv_bytes=kv_bytes,
        journal_bytes=tokens * memory.journal_bytes_per_token,
        park_bytes=park_bytes,
        prefix_bytes=min(prefix_bytes, prefix_room),
        free_bytes=memory.free_bytes,
    )


def _auto_tokens(memory: Memory, blocks: int) -> int:
    left = memory.usable_bytes - memory.bytes_of(blocks, 0)
    fit = left // memory.bytes_per_token(blocks)
    if not memory.is_shared and memory.journal_bytes_per_token:
        fit = min(fit, memory.usable_host_bytes // memory.journal_bytes_per_token)
    share = max(fit // 2, min(fit, ROOM_TOKENS)) if memory.is_shared else fit
    return max(1, min(share, MOST_TOKENS))


def _nothing_fits(memory: Memory, room: int) -> str:
    ends = size(memory.ends.beside(1))
    beside = f", the end of the model beside it {ends}" if memory.ends.beside(1) else ""
    return (
        f"not one block fits on {memory.device}: it takes {size(memory.largest_block_bytes)}"
        f"{beside} and KV of {room:,} tokens {size(room * memory.bytes_per_token(1))}, of "
        f"{size(memory.usable_bytes)} usable; free memory, or set a smaller --kv-tokens or --dtype"
    )


def _too_much(memory: Memory, blocks: int, kv_tokens: int | None, num_blocks: int) -> str:
    fit = memory.blocks_with(kv_tokens or ROOM_TOKENS, num_blocks)
    mend = f"--num-blocks {fit} fits" if fit else "free memory, or set a smaller --kv-tokens"
    kv = f" and KV of {kv_tokens:,} tokens" if kv_tokens else ""
    return (
        f"{blocks} blocks{kv} take {size(memory.bytes_of(blocks, kv_tokens or 1))} on "
        f"{memory.device}, {size(memory.usable_bytes)} are usable: {mend}"
    )


def _no_room_for_journal(memory: Memory, tokens: int) -> str:
    fit = memory.usable_host_bytes // memory.journal_bytes_per_token
    return (
        f"the journal of {tokens:,} KV tokens takes up to "
        f"{size(tokens * memory.journal_bytes_per_token)} of host memory, "
        f"{size(memory.usable_host_bytes)} are usable: --kv-tokens {fit} fits"
    )


def _usable(free_bytes: int) -> int:
    return max(0, free_bytes - RESERVE_BYTES - free_bytes // RESERVE_SHARE)


def size(count_bytes: int) -> str:
    """Bytes for people: `1.5 GB`."""
    value = float(count_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
