"""Frozen value types that every other package speaks in; no torch, no I/O."""

from bloombee.core.backoff import doubled
from bloombee.core.identifiers import PeerId, SessionId
from bloombee.core.packed import PackedTable
from bloombee.core.span import Route, Span, Stage
from bloombee.core.step import Phase

__all__ = [
    "PackedTable",
    "PeerId",
    "Phase",
    "Route",
    "SessionId",
    "Span",
    "Stage",
    "doubled",
]
