"""The model that a server is about to load: its files, device and dtype, and what fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from bloombee.config.settings import ServerSettings
from bloombee.core import Span
from bloombee.models import ModelSource, ends_bytes, open_source, resolve_dtype
from bloombee.models.ends import BOTH, FIRST, LAST
from bloombee.server.device import choose_device, free_bytes
from bloombee.server.memory import Ends, Memory, MemoryPlan, plan_memory
from bloombee.server.placement import wanted_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The model before loading, what it runs in, and how `room` there is shared out."""

    source: ModelSource
    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    max_length: int
    room: Memory
    memory: MemoryPlan

    def settled(self, settings: ServerSettings, span: Span) -> Self:
        """With the plan for `span`: where no end of the model is needed, KV gets its room."""
        room = replace(self.room, ends=self.room.ends.at(span))
        return replace(self, memory=_plan(settings, room, self.source.num_blocks, len(span)))


def open_model(settings: ServerSettings) -> Opened:
    """Read the model's config, hash what identifies it, and plan memory.

    Raises SettingsError and ModelError for what the user can mend.
    """
    device = choose_device(settings.device)
    source = open_source(settings.model)
    if settings.blocks is not None:
        source.check_span(settings.blocks)
    dtype = resolve_dtype(settings.dtype, source, device)
    room = _room(settings, source, dtype, device)
    return Opened(
        source=source,
        fingerprint=source.fingerprint,
        device=device,
        dtype=dtype,
        max_length=min(settings.max_length or source.max_length, source.max_length),
        room=room,
        memory=_plan(settings, room, source.num_blocks, wanted_blocks(settings)),
    )


def _room(
    settings: ServerSettings, source: ModelSource, dtype: torch.dtype, device: torch.device
) -> Memory:
    first, last, both = (
        ends_bytes(source, ends, dtype=dtype, device=device) for ends in (FIRST, LAST, BOTH)
    )
    ends = Ends(source.num_blocks, first, last, both)
    return Memory(
        device=str(device),
        free_bytes=free_bytes(device),
        host_free_bytes=free_bytes(torch.device("cpu")),
        largest_block_bytes=source.block_bytes(dtype),
        kv_bytes_per_token_and_block=source.kv_shape(Span(0, 1), dtype, device).block_token_bytes,
        journal_bytes_per_token=source.hidden_size * dtype.itemsize,
        ends=ends if settings.blocks is None else ends.at(settings.blocks),
    )


def _plan(
    settings: ServerSettings, room: Memory, num_blocks: int, wanted: int | None
) -> MemoryPlan:
    return plan_memory(
        room,
        num_blocks=num_blocks,
        wanted_blocks=wanted,
        kv_tokens=None if settings.kv_tokens == "auto" else settings.kv_tokens,
        park_bytes=settings.park_bytes,
        prefix_bytes=None if settings.prefix_bytes == "auto" else settings.prefix_bytes,
    )
