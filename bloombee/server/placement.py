"""Which blocks this server takes: those it is told to, or where the swarm serves least."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from bloombee.config.settings import ServerSettings
from bloombee.core import Span
from bloombee.planner.moves import rates, supply
from bloombee.planner.placement import Newcomer, choose_span, spread
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.swarm.view import SwarmSnapshot

SETTLE_S = 1.0
"""How long a choice stands open, so that servers started together see each other's."""


class Noticeboard(Protocol):
    """What placement needs of a swarm node."""

    async def publish(self, record: ServerRecord) -> None:
        """Make the record visible to all."""
        ...

    async def snapshot(
        self, fingerprint: str | None = None, num_blocks: int | None = None
    ) -> SwarmSnapshot:
        """What others have published."""
        ...


def wanted_blocks(settings: ServerSettings) -> int | None:
    """How many blocks the user asks for; None leaves it to memory."""
    return len(settings.blocks) if settings.blocks is not None else settings.num_blocks


def place(
    settings: ServerSettings, capacity_blocks: int, num_blocks: int, snapshot: SwarmSnapshot
) -> Span:
    """The span to serve: `--blocks`, or `capacity_blocks` of a model of `num_blocks`.

    Servers that still load or move count as serving what they will hold. `snapshot` holds
    the servers of this model only.
    """
    if settings.blocks is not None:
        return settings.blocks
    return choose_span(num_blocks, capacity_blocks, supply(snapshot.records, num_blocks).tolist())


def settle(record: ServerRecord, snapshot: SwarmSnapshot) -> Span:
    """The span of `record`'s server among all those that are choosing in `snapshot`."""
    others = [other for other in snapshot.records if other.peer != record.peer]
    mine = replace(record, state=ServerState.CHOOSING)
    known = sorted([*others, mine], key=lambda other: other.peer)
    newcomers = [
        Newcomer(each.peer, len(each.span), float(rate))
        for each, rate in zip(known, rates(known, record.num_blocks), strict=True)
        if each.state is ServerState.CHOOSING
    ]
    held = supply(known, record.num_blocks).tolist()
    return spread(record.num_blocks, held, newcomers)[record.peer]


async def claim(record: ServerRecord, board: Noticeboard, *, fixed: bool) -> ServerRecord:
    """Publish that the server will hold the record's span, or one that suits the swarm better.

    Returns the record as published last: joining, with the span to load. A `fixed` span
    is taken as it is, and so is one of all blocks. Raises SwarmError.
    """
    joining = replace(record, state=ServerState.JOINING)
    if not fixed and len(record.span) < record.num_blocks:
        record = replace(record, state=ServerState.CHOOSING)
        await board.publish(record)
        await asyncio.sleep(SETTLE_S)
        snapshot = await board.snapshot(record.fingerprint, record.num_blocks)
        joining = replace(joining, span=settle(record, snapshot))
    await board.publish(joining)
    return joining
