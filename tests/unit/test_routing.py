"""Routing by records alone: few stages, speed, chance; errors that say what is missing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from bloombee.client.routing import Demand, choose_route, missing_spans
from bloombee.core import PeerId, Route, Span
from bloombee.errors import RequestError, SwarmError


@dataclass(frozen=True)
class Server:
    peer: PeerId
    span: Span
    state: str = "online"
    fingerprint: str = "m"
    dtype: str = "float32"
    kv_tokens: int = 10_000
    max_length: int = 2048
    throughput_tokens_per_s: float = 100.0


DEMAND = Demand(num_blocks=30, fingerprint="m", dtype="float32", sequences=2, max_length=100)


def server(name: str, span: str, **changes: object) -> Server:
    return replace(Server(PeerId(name), Span.parse(span)), **changes)


def route(
    *servers: Server,
    demand: Demand = DEMAND,
    seed: int = 0,
    exclude: frozenset[PeerId] = frozenset(),
) -> Route:
    return choose_route(servers, demand, tie_break=random.Random(seed).random, exclude=exclude)


def shape(found: Route) -> list[tuple[str, str]]:
    return [(stage.peer, str(stage.span)) for stage in found.stages]


def test_three_spans_that_join_make_the_route() -> None:
    found = route(server("c", "20:30"), server("a", "0:10"), server("b", "10:20"))
    assert shape(found) == [("a", "0:10"), ("b", "10:20"), ("c", "20:30")]


def test_a_stage_fewer_beats_a_little_speed_but_not_much() -> None:
    halves = server("a", "0:15"), server("b", "15:30")
    slower, slow = (server("all", "0:30", throughput_tokens_per_s=t) for t in (40.0, 1.0))
    assert shape(route(*halves, slower)) == [("all", "0:30")]
    assert shape(route(*halves, slow)) == [("a", "0:15"), ("b", "15:30")]


def test_among_equally_many_stages_the_faster_server_gets_more_blocks() -> None:
    fast, slow = (
        server("f", "0:20", throughput_tokens_per_s=200.0),
        server("s", "10:30", throughput_tokens_per_s=50.0),
    )
    assert shape(route(fast, slow)) == [("f", "0:20"), ("s", "20:30")]
    assert shape(route(replace(fast, throughput_tokens_per_s=20.0), slow)) == [
        ("f", "0:10"),
        ("s", "10:30"),
    ]


def test_ties_are_broken_by_the_given_numbers_only() -> None:
    twins = [server(name, "0:30") for name in "abcdefgh"]
    chosen = {shape(route(*twins, seed=seed))[0][0] for seed in range(50)}
    assert len(chosen) > 3
    assert shape(route(*twins, seed=7)) == shape(route(*reversed(twins), seed=7))


def test_missing_blocks_and_the_reasons_are_named() -> None:
    with pytest.raises(SwarmError) as caught:
        route(
            server("aaaaaaaa", "0:10"),
            server("bbbbbbbb", "10:20", state="joining"),
            server("cccccccc", "20:30", dtype="bfloat16"),
        )
    message = str(caught.value)
    assert "no server holds blocks 10:30 of 0:30" in message
    assert "bbbbbbbb (10:20) is joining" in message
    assert "cccccccc (20:30) serves bfloat16, not float32" in message
    assert "\n" not in message


def test_an_empty_swarm_misses_every_block() -> None:
    with pytest.raises(SwarmError, match="no server holds blocks 0:30"):
        route()


def test_another_models_server_is_never_used() -> None:
    with pytest.raises(SwarmError, match="serves another model"):
        route(server("a", "0:30", fingerprint="other"))


def test_a_failed_peer_is_avoided() -> None:
    first, second = server("a", "0:30"), server("b", "0:30", throughput_tokens_per_s=1.0)
    assert shape(route(first, second, exclude=frozenset({first.peer}))) == [("b", "0:30")]


def test_a_session_too_long_is_a_request_error_with_numbers() -> None:
    with pytest.raises(RequestError, match=r"2 sequences of 100 tokens .* at most 64 tokens"):
        route(server("a", "0:10", max_length=64), server("b", "10:30"))
    with pytest.raises(RequestError, match="holds 150 KV tokens"):
        route(server("a", "0:10"), server("b", "10:30", kv_tokens=150))


def test_too_small_servers_are_not_blamed_for_blocks_nobody_holds() -> None:
    with pytest.raises(SwarmError, match=r"no server holds blocks 0:30"):
        route(server("a", "0:10", max_length=64))


def test_missing_spans_between_overlaps() -> None:
    spans = [Span(2, 6), Span(4, 8), Span(12, 14)]
    assert [str(s) for s in missing_spans(spans, 16)] == ["0:2", "8:12", "14:16"]
    assert missing_spans([Span(0, 16)], 16) == []
    assert [str(s) for s in missing_spans([Span(0, 2), Span(9, 12)], 4)] == ["2:4"]
    assert missing_spans([Span(0, 4), Span(9, 12)], 4) == []
