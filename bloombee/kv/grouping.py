"""Which rows of a step attend together. Pure.

Rows in adjacent slots form one strided batch, so they cost one set of calls
instead of one each. A batch is as wide as its longest row and spans the slots
between its rows, which wastes reads; a merge is worth it while the waste costs
less than another set of calls would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Row `index` of a step reads `width` tokens (whole lanes) from `low` of its slot."""

    index: int
    slot: int
    low: int
    width: int


def group_pieces(
    pieces: Iterable[Piece], waste_tokens: int, same_rounding: Callable[[int, int], bool]
) -> list[list[Piece]]:
    """Groups of pieces in slot order.

    `waste_tokens` is what one more set of calls costs, in tokens read. Pieces join
    only when they start at the same token and `same_rounding(own, group)` widths
    give each the very result it gets alone.
    """
    groups: list[list[Piece]] = []
    width = 0
    for piece in sorted(pieces, key=lambda piece: piece.slot):
        if groups and _joins(groups[-1], width, piece, waste_tokens, same_rounding):
            groups[-1].append(piece)
            width = max(width, piece.width)
        else:
            groups.append([piece])
            width = piece.width
    return groups


def _joins(
    group: list[Piece],
    width: int,
    piece: Piece,
    waste_tokens: int,
    same_rounding: Callable[[int, int], bool],
) -> bool:
    if piece.low != group[0].low:
        return False
    wider = max(width, piece.width)
    slots_before = group[-1].slot - group[0].slot + 1
    slots_after = piece.slot - group[0].slot + 1
    waste = slots_after * wider - slots_before * width - piece.width
    if waste > waste_tokens:
        return False
    return all(same_rounding(own, wider) for own in {piece.width, *(p.width for p in group)})
