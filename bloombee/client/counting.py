"""What is known of a route, put together for choosing how many micro-batches it carries."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bloombee.client.descriptions import Descriptions
from bloombee.client.surroundings import Holder
from bloombee.client.terms import SessionTerms
from bloombee.core import PeerId
from bloombee.planner.hearsay import LinkFacts, link_of, table_of
from bloombee.planner.link_control import RAW, USUAL
from bloombee.planner.micro_batching import (
    HopFacts,
    Pipeline,
    StageFacts,
    decode_count,
    pipeline_of,
    usual_count,
)
from bloombee.protocol.messages import Description

_log = logging.getLogger(__name__)

ROWS = 32
"""Up to which the time of a row is read from a server's table."""


def count_for(rows: int, route: Sequence[Holder], known: Descriptions, terms: SessionTerms) -> int:
    """How many micro-batches `rows` decode in on `route`, by what is known of it."""
    usual = usual_count(rows, len(route))
    figures = pipeline(route, known, terms)
    if figures is None:
        _log.debug("%d micro-batches: too little is known of the route", usual)
        return usual
    found = decode_count(rows, figures)
    level = logging.DEBUG if found.count == usual else logging.INFO
    _log.log(level, "%d micro-batches: %s", found.count, found.reason)
    return found.count


def pipeline(route: Sequence[Holder], known: Descriptions, terms: SessionTerms) -> Pipeline | None:
    """The route's figures in mid-session; None when some stage or hop is unknown."""
    context, dtype = terms.max_length // 2, terms.dtype
    said = [known.of(holder.stage.peer) for holder in route]
    stages = [
        None if each is None else _stage(each, len(holder.stage.span), context, is_last=at == 0)
        for at, (holder, each) in enumerate(zip(reversed(route), reversed(said), strict=True))
    ]
    hops = [
        None if each is None else _hop(each, after.stage.peer, terms.row_bytes, dtype)
        for each, after in zip(said, route[1:], strict=False)
    ]
    back = None if said[-1] is None else _link(said[-1], route[0].stage.peer)
    back_s = 0.0 if back is None else back.alpha_s
    return pipeline_of(stages[::-1], hops, back_s)


def _stage(said: Description, blocks: int, context: int, *, is_last: bool) -> StageFacts | None:
    costs = said.costs
    table = None if costs is None else table_of(costs.decode)
    if costs is None or table is None:
        return None
    first_s, all_s = (blocks * table.at(rows, context) + costs.pass_s for rows in (1, ROWS))
    if is_last and costs.head is not None and (head := table_of(costs.head)) is not None:
        first_s, all_s = first_s + head.at(1, 0), all_s + head.at(ROWS, 0)
    return StageFacts(
        first_s=first_s,
        row_s=max(0.0, all_s - first_s) / (ROWS - 1),
        pace=min(max(said.pace, 1.0), 1e3),
        machine=said.machine,
        cores=said.cores,
    )


def _link(said: Description, peer: PeerId) -> LinkFacts | None:
    report = next((link for link in said.links if link.peer == peer), None)
    return None if report is None else link_of(report)


def _hop(said: Description, after: PeerId, row_bytes: int, dtype: str) -> HopFacts | None:
    report = next((link for link in said.links if link.peer == after), None)
    facts = None if report is None else link_of(report)
    if report is None or facts is None or not facts.bytes_per_s:
        return None
    ratio = 1.0 if report.codec == RAW or dtype not in USUAL else USUAL[dtype].ratio
    return HopFacts(
        alpha_s=facts.alpha_s, bytes_per_s=facts.bytes_per_s, row_bytes=row_bytes * ratio
    )
