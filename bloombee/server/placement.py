"""Which blocks this server takes: those it is told to, or where the swarm covers least."""

from __future__ import annotations

from bloombee.config.settings import ServerSettings
from bloombee.core import Span
from bloombee.planner.placement import choose_span
from bloombee.swarm.view import PLANNED, SwarmSnapshot


def wanted_blocks(settings: ServerSettings) -> int | None:
    """How many blocks the user asks for; None leaves it to memory."""
    return len(settings.blocks) if settings.blocks is not None else settings.num_blocks


def place(
    settings: ServerSettings, capacity_blocks: int, num_blocks: int, snapshot: SwarmSnapshot
) -> Span:
    """The span to serve: `--blocks`, or `capacity_blocks` of a model of `num_blocks`.

    Servers that still load count as covering theirs, so that several that start
    together spread. `snapshot` holds the servers of this model only.
    """
    if settings.blocks is not None:
        return settings.blocks
    planned = snapshot.select(states=PLANNED)
    return choose_span(num_blocks, capacity_blocks, planned.servers_per_block(num_blocks))
