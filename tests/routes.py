"""Servers and routes in as few words as tests of routing want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bloombee.core import PeerId, Route, Span
from bloombee.planner.hearsay import NOTHING, Knowledge
from bloombee.planner.route_costs import Errand
from bloombee.planner.routing import find_route

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Server:
    peer: PeerId
    span: Span
    throughput_tokens_per_s: float = 50.0


def server(name: str, span: str, tokens_per_s: float = 50.0) -> Server:
    return Server(PeerId(name), Span.parse(span), tokens_per_s)


def shape(route: Route) -> list[tuple[str, str]]:
    return [(stage.peer, str(stage.span)) for stage in route.stages]


def chosen(servers: Sequence[Server], known: Knowledge = NOTHING, **errand: Any) -> Route:
    found = find_route(servers, Span(0, 30), Errand(**errand), known)
    assert found is not None
    return found.route
