"""What `bloombee-status --links` shows: how servers have measured their links; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from bloombee.protocol.messages import Description

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bloombee.core import PeerId
    from bloombee.protocol.messages import LinkReport
    from bloombee.swarm.describe import Answer


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One directed link; what is not known of it is None. `to_server`: not to a client."""

    source: str
    target: str
    to_server: bool
    rtt_ms: float | None
    mbps: float | None
    clock_ms: float | None
    samples: int
    age_s: float
    codec: str
    reason: str


def links_of(answers: Mapping[PeerId, Answer]) -> tuple[LinkStatus, ...]:
    """The links that servers told of, by source and target."""
    told = [
        _status(said, link, to_server=link.peer in answers)
        for said in answers.values()
        if isinstance(said, Description)
        for link in said.links
    ]
    return tuple(sorted(told, key=lambda each: (each.source, not each.to_server, each.target)))


def _status(said: Description, link: LinkReport, *, to_server: bool) -> LinkStatus:
    return LinkStatus(
        source=said.peer,
        target=link.peer,
        to_server=to_server,
        rtt_ms=round(link.rtt_s * 1e3, 3) or None,
        mbps=round(link.bytes_per_s * 8 / 1e6, 3) or None,
        clock_ms=round(link.offset_s * 1e3, 3) if link.rtt_s else None,
        samples=link.samples,
        age_s=round(link.age_s, 1),
        codec=link.codec,
        reason=link.reason,
    )


def links_table(links: tuple[LinkStatus, ...]) -> Table:
    """The links for a terminal."""
    table = Table(box=None, pad_edge=False)
    for name in ("from", "to"):
        table.add_column(name)
    for name in ("RTT ms", "Mbit/s", "age s"):
        table.add_column(name, justify="right")
    table.add_column("codec")
    table.add_column("because", overflow="fold")
    for link in links:
        table.add_row(
            link.source[-8:],
            link.target[-8:] if link.to_server else f"client {link.target[-8:]}",
            "?" if link.rtt_ms is None else f"{link.rtt_ms:.1f}",
            "?" if link.mbps is None else f"{link.mbps:,.1f}",
            f"{link.age_s:.0f}",
            link.codec,
            link.reason,
        )
    if not links:
        table.add_row("no server has measured a link yet: they do while sessions run")
    return table
