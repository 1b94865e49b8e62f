"""What a snapshot of the swarm says: who covers what, what is missing, whom to believe."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from bloombee.cli.status_links import links_of, links_table
from bloombee.cli.status_report import coverage_bar, report
from bloombee.core import PeerId, Span
from bloombee.errors import TransportError
from bloombee.protocol.messages import Description, LinkReport
from bloombee.swarm.records import ModelAnnouncement, ServerRecord, ServerState
from bloombee.swarm.view import SERVING, ModelEntry, assemble

if TYPE_CHECKING:
    from bloombee.swarm.describe import Answer

NOW_S = 1000.0
BASE = ServerRecord(
    peer=PeerId("p"),
    fingerprint="f1",
    model="llama",
    num_blocks=30,
    span=Span(0, 10),
    addresses=("127.0.0.1:5000",),
    certificate_hash=b"",
    dtype="float32",
    kv_tokens=100,
    max_length=64,
    throughput_tokens_per_s=2.0,
    version="1",
    state=ServerState.ONLINE,
    published_at_s=NOW_S - 1,
)


def server(peer: str, start: int = 0, end: int = 10, **changes: Any) -> ServerRecord:
    return replace(BASE, peer=PeerId(peer), span=Span(start, end), **changes)


@pytest.mark.parametrize(
    ("spans", "missing"),
    [
        ([(0, 30)], ""),
        ([], "0:30"),
        ([(0, 10), (20, 30)], "10:20"),
        ([(5, 10), (8, 12), (20, 29)], "0:5, 12:20, 29:30"),
    ],
)
def test_missing_blocks(spans: list[tuple[int, int]], missing: str) -> None:
    records = [server(str(index), *span) for index, span in enumerate(spans)]
    snapshot = assemble(records, [], NOW_S)
    assert snapshot.missing_text(30) == missing


def test_coverage_adds_up_throughput() -> None:
    snapshot = assemble(
        [server("a", 0, 20), server("b", 10, 30, throughput_tokens_per_s=3.0)], [], NOW_S
    )
    assert snapshot.coverage(30) == (2.0,) * 10 + (5.0,) * 10 + (3.0,) * 10
    assert snapshot.servers_per_block(30) == (1,) * 10 + (2,) * 10 + (1,) * 10


def test_selection() -> None:
    records = [
        server("a"),
        server("b", state=ServerState.JOINING),
        server("c", dtype="bfloat16"),
        server("d", fingerprint="f2", num_blocks=12),
        server("e", state=ServerState.LEAVING),
    ]
    snapshot = assemble(records, [], NOW_S)
    pick = lambda **how: {record.peer for record in snapshot.select(**how).records}  # noqa: E731
    assert pick() == {"a", "b", "c", "d", "e"}
    assert pick(fingerprint="f1", states=SERVING) == {"a", "c"}
    assert pick(fingerprint="f1", states=frozenset({ServerState.ONLINE, ServerState.JOINING})) == {
        "a",
        "b",
        "c",
    }
    assert pick(dtype="bfloat16") == {"c"}
    assert pick(where=lambda record: record.peer != "a") == {"b", "c", "d", "e"}
    found = snapshot.find(PeerId("b"))
    assert found is not None and found.state is ServerState.JOINING
    assert snapshot.find(PeerId("z")) is None


def test_of_copies_the_last_published_counts_in_any_order() -> None:
    copies = [
        server("a", 0, 10, published_at_s=1.0),
        server("a", 20, 30, published_at_s=3.0),
        server("a", 10, 20, published_at_s=2.0),
    ] * 2
    for _ in range(5):
        random.shuffle(copies)
        assert [record.span for record in assemble(copies, [], NOW_S).records] == [Span(20, 30)]


def test_who_lies_about_the_model_is_outvoted() -> None:
    records = [server("a"), server("b"), server("liar", 0, 1, num_blocks=1, model="mine")]
    announcements = [ModelAnnouncement(PeerId("c"), "f1", "llama", 30)]
    snapshot = assemble(records, announcements, NOW_S)
    assert snapshot.models == (ModelEntry("f1", "llama", 30),)
    assert {record.peer for record in snapshot.records} == {"a", "b"}


def test_models_are_known_without_records() -> None:
    announcements = [ModelAnnouncement(PeerId("c"), "f9", "qwen", 28)]
    snapshot = assemble([], announcements, NOW_S)
    assert snapshot.model("f9") == ModelEntry("f9", "qwen", 28)
    assert snapshot.model("f1") is None and snapshot.records == ()


# Status ------------------------------------------------------------------------------


def test_status_names_what_is_missing_and_who_is_off() -> None:
    records = [
        server("a" * 10, 0, 10),
        server("b" * 10, 10, 20, published_at_s=NOW_S + 7, version="2"),
        server("c" * 10, 0, 30, state=ServerState.JOINING),
        server("d" * 10, 0, 10, published_at_s=NOW_S - 25),
    ]
    said = Description("a" * 10, "1", "llama", "f1", 0, 10, "float32", "cpu", 100, 42, 3, 9, 1.0)
    answers = {PeerId("a" * 10): said, PeerId("b" * 10): TransportError("refused; try again")}
    status = report(assemble(records, [], NOW_S), answers, clock_skew_s=0.0)
    (model,) = status.models
    assert model.missing == ("20:30",)
    assert model.coverage == (2,) * 10 + (1,) * 10 + (0,) * 10
    by_peer = {line.peer[0]: line for line in model.servers}
    assert by_peer["a"].free_tokens == 42 and by_peer["a"].sessions == 3
    assert by_peer["b"].free_tokens is None and by_peer["b"].problem == "refused; try again"
    assert by_peer["c"].state == "joining"
    silent, ahead, versions, unasked = status.warnings
    assert "bbbbbbbb" in ahead and "7.0 s ahead" in ahead
    assert "dddddddd" in silent and "25 s ago" in silent
    assert "1, 2" in versions
    assert "bbbbbbbb" in unasked and "refused; try again" in unasked


def test_status_does_not_call_complete_what_nobody_answered_for() -> None:
    records = [server("a", 0, 20), server("b", 10, 30)]
    answers = {PeerId("b"): TransportError("refused")}
    (model,) = report(assemble(records, [], NOW_S), answers, clock_skew_s=0.0).models
    assert model.missing == ()
    assert model.silent == ("20:30",)
    (model,) = report(assemble(records, [], NOW_S), {}, clock_skew_s=0.0).models
    assert model.silent == ()


def test_our_own_skew_is_no_one_elses_fault() -> None:
    snapshot = assemble([server("a", published_at_s=NOW_S + 7)], [], NOW_S)
    assert report(snapshot, {}, clock_skew_s=7.5).warnings == ()


@pytest.mark.parametrize(
    ("coverage", "bar"),
    [((0, 1, 9, 10), ".19+"), ((1,) * 80, "1" * 80), ((2,) * 159 + (0,), "2" * 79 + ".")],
)
def test_coverage_bar(coverage: tuple[int, ...], bar: str) -> None:
    assert coverage_bar(coverage) == bar


def test_links_as_servers_told_of_them() -> None:
    said = Description("a", "1", "m", "f", 0, 2, "float32", "cpu", 1, 1, 0, 0, 1.0, links=(
        LinkReport("b", 0.02, 2.5e6, 0.5, 7, 1.0, "split", "slow"), LinkReport("client"),
    ))  # fmt: skip
    peers: dict[PeerId, Answer] = {PeerId("a"): said, PeerId("b"): TransportError("gone")}
    known, unknown = links_of(peers)
    assert (known.target, known.to_server, known.rtt_ms, known.mbps) == ("b", True, 20.0, 20.0)
    assert (known.codec, known.reason, known.clock_ms) == ("split", "slow", 500.0)
    assert (unknown.to_server, unknown.rtt_ms, unknown.mbps) == (False, None, None)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(links_table((known, unknown)))
    assert "client client" in console.export_text()
