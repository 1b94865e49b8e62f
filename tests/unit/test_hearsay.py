"""What strangers say of themselves, and what is made of it."""

from __future__ import annotations

import pytest

from bloombee.core import PeerId, Span
from bloombee.planner.hearsay import (
    LEAST_BLOCK_S,
    Knowledge,
    LinkFacts,
    ServerFacts,
    corrected,
    facts_of,
    faded,
    link_of,
    table_of,
)
from bloombee.planner.route_costs import Errand, costs_of, links
from bloombee.planner.routing import token_s
from bloombee.protocol.messages import CostTable, Description, LinkReport, TimeGrid
from tests.routes import chosen, server, shape

NAN, INF = float("nan"), float("inf")


def _description(**changes: object) -> Description:
    plain = {
        "peer": "p",
        "version": "1",
        "model": "m",
        "fingerprint": "f",
        "start": 0,
        "end": 30,
        "dtype": "float32",
        "device": "cpu",
        "kv_tokens": 1000,
        "free_tokens": 700,
        "sessions": 1,
        "steps": 5,
        "uptime_s": 3.0,
    }
    return Description(**{**plain, **changes})


def _costs(seconds: float, pass_s: float = 0.001) -> CostTable:
    grid = TimeGrid((1,), (0,), ((seconds,),))
    return CostTable("cpu", grid, grid, None, pass_s, 0, 0, 0, 0)


def test_a_description_tells_costs_and_load() -> None:
    told = _description(busy=0.5, decode_rows=3, waiting=1, costs=_costs(0.004))
    facts = facts_of(told, ServerFacts(rtt_s=0.02, correction=2.0))
    assert facts.decode is not None and facts.decode.at(1, 0) == 0.004
    assert (facts.pass_s, facts.busy, facts.decode_rows, facts.waiting) == (0.001, 0.5, 3, 1)
    assert (facts.free_tokens, facts.rtt_s, facts.correction) == (700, 0.02, 2.0)
    later = facts_of(_description(), facts)  # load only, or a server that knows no costs
    assert (later.decode, later.decode_rows) == (facts.decode, 0)


@pytest.mark.parametrize("seconds", [NAN, INF, -1.0, 1e9])
def test_absurd_times_count_as_unknown(seconds: float) -> None:
    assert facts_of(_description(costs=_costs(seconds))).decode is None
    assert facts_of(_description(costs=_costs(0.1, seconds), busy=seconds)).pass_s in (0.0, 600.0)
    assert 0 <= facts_of(_description(busy=seconds)).busy <= 1


def test_nobody_computes_in_no_time() -> None:
    table = table_of(TimeGrid((1, 2), (0,), ((0.5,), (0.0,))))
    assert table is not None and table.at(2, 0) == pytest.approx(LEAST_BLOCK_S)
    known = Knowledge({PeerId("liar"): ServerFacts(decode=table, prefill=table)})
    costs = costs_of([server("liar", "0:30", INF)], Span(0, 30), Errand(rows=9), known)
    assert costs.unit_s[0] >= LEAST_BLOCK_S
    assert table_of(TimeGrid((2, 1), (0,), ((0.1,), (0.1,)))) is None  # axes ascend
    assert table_of(TimeGrid((1, 2), (0,), ((0.1,),))) is None


def test_links_that_can_not_be_are_not_believed() -> None:
    assert link_of(LinkReport("q", rtt_s=0.04, bytes_per_s=1e6)) == LinkFacts(0.02, 1e6)
    assert link_of(LinkReport("q", rtt_s=NAN, bytes_per_s=1e6)) == LinkFacts(0.0, 1e6)
    assert link_of(LinkReport("q", rtt_s=-1.0, bytes_per_s=INF)) is None
    assert link_of(LinkReport("q", rtt_s=0.04, age_s=1e9)) is None


def test_nobody_is_next_to_everybody() -> None:
    """One that is 100 ms from us can't be 0 ms from one beside us, whatever both say."""
    servers = [server("here", "0:15"), server("there", "15:30")]
    here, there = (s.peer for s in servers)
    facts = {here: ServerFacts(rtt_s=0.002), there: ServerFacts(rtt_s=0.2)}
    alone = Knowledge(facts, {(here, there): LinkFacts(1e-6)})
    assert links(servers, alone)[0][0, 1] == pytest.approx(0.0495)
    honest = Knowledge(facts, {(here, there): LinkFacts(1e-6), (there, here): LinkFacts(0.1)})
    assert links(servers, honest)[0][0, 1] == 0.1
    assert links(servers, Knowledge(facts))[0][0, 1] == 0.1  # nobody told: the farther one's


def test_a_server_that_keeps_no_promise_is_avoided_for_a_while() -> None:
    liar, honest = server("liar", "0:30", 1000.0), server("honest", "0:30", 50.0)
    assert shape(chosen([liar, honest])) == [("liar", "0:30")]
    correction = 1.0
    for _ in range(3):
        promised = token_s(
            chosen([liar]),
            [liar],
            Errand(),
            Knowledge({liar.peer: ServerFacts(correction=correction)}),
        )
        correction = corrected(correction, 0.5, promised)
    known = Knowledge({liar.peer: ServerFacts(correction=correction)})
    assert shape(chosen([liar, honest], known)) == [("honest", "0:30")]
    later = Knowledge({liar.peer: ServerFacts(correction=faded(correction, 3600, 600))})
    assert shape(chosen([liar, honest], later)) == [("liar", "0:30")]


def test_corrections_have_bounds_and_ignore_noise() -> None:
    assert corrected(1.0, 0.011, 0.010) == 1.0
    assert corrected(1.0, 0.040, 0.010) == pytest.approx(4.0)
    assert corrected(1.0, 0.040, 0.010, stages=3) == pytest.approx(2.0)
    assert corrected(19.0, 1e9, 0.010) == 20.0
    assert corrected(1.0, 1e-9, 0.010) == 1.0
    assert corrected(8.0, 0.0025, 0.010) == pytest.approx(2.0)
    assert corrected(1.5, NAN, 0.010) == 1.5
