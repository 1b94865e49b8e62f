"""Under which DHT keys records lie.

A server's record lies under the key of every range of blocks that its span
touches, so that a reader fetches only what it needs and no key grows with the
whole swarm. Each key exists in copies, which hash to different DHT nodes: losing
the nodes of one key loses nothing. Models are announced under a key of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloombee.core import Span

COPIES = 2
BLOCKS_PER_KEY = 32
_PREFIX = "bloombee/1"


def model_keys() -> tuple[str, ...]:
    """Where servers announce which models exist."""
    return tuple(f"{_PREFIX}/models/{copy}" for copy in range(COPIES))


def span_keys(fingerprint: str, span: Span) -> tuple[str, ...]:
    """Where the records of servers that hold any block of `span` lie."""
    first, last = span.start // BLOCKS_PER_KEY, (span.end - 1) // BLOCKS_PER_KEY
    return tuple(
        f"{_PREFIX}/{fingerprint}/{index}/{copy}"
        for index in range(first, last + 1)
        for copy in range(COPIES)
    )
