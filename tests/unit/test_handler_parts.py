"""Where a server is reached, which blocks and device it takes, and work beside the loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace

import pytest
import torch

from bloombee.config.settings import ServerSettings
from bloombee.core import PeerId, Span
from bloombee.errors import SettingsError
from bloombee.server.announcement import announced_address, announced_host, announced_name
from bloombee.server.background import in_background
from bloombee.server.device import choose_device, decode_tokens_per_s, free_bytes
from bloombee.server.placement import place, settle, wanted_blocks
from bloombee.server.throttle import FORGET_ABOVE, Throttle
from bloombee.server.window import Window
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.swarm.view import SwarmSnapshot
from tests.counting_pool import AddingModel, CountingPool

LOOPBACK_PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooW9xTJLEsik7ih6659aY6RUUw1avDrEMJNcEwhtCnqjZAd"


class TestAnnouncement:
    @pytest.mark.parametrize(
        ("host", "peers", "expected"),
        [
            ("127.0.0.1", (), "127.0.0.1"),
            ("203.0.113.5", (LOOPBACK_PEER,), "203.0.113.5"),
            ("0.0.0.0", (LOOPBACK_PEER,), "127.0.0.1"),
            ("::", ("/ip6/::1/tcp/1/p2p/x",), "127.0.0.1"),
        ],
    )
    def test_host(self, host: str, peers: tuple[str, ...], expected: str) -> None:
        assert announced_host(host, peers) == expected

    def test_a_server_on_all_addresses_announces_one_of_its_own(self) -> None:
        host = announced_host("0.0.0.0", ("/ip4/198.51.100.7/tcp/1/p2p/x", LOOPBACK_PEER))
        with socket.socket() as probe:
            probe.bind((host, 0))

    @pytest.mark.parametrize(
        ("announce", "expected", "name"),
        [
            (None, "10.0.0.1:500", None),
            ("example.org", "example.org:500", "example.org"),
            ("example.org:7000", "example.org:7000", "example.org"),
            ("[2001:db8::1]", "[2001:db8::1]:500", "2001:db8::1"),
            ("[2001:db8::1]:7000", "[2001:db8::1]:7000", "2001:db8::1"),
        ],
    )
    def test_address(self, announce: str | None, expected: str, name: str | None) -> None:
        assert announced_address(announce, "10.0.0.1", 500) == expected
        assert announced_name(announce) == name


def settings(**changes: object) -> ServerSettings:
    return ServerSettings.model_validate({"model": "m", "new_swarm": True} | changes)


def record(start: int, end: int, state: ServerState = ServerState.ONLINE) -> ServerRecord:
    return ServerRecord(
        peer=PeerId(f"{start}:{end}"),
        fingerprint="f",
        model="m",
        num_blocks=10,
        span=Span(start, end),
        addresses=(),
        certificate_hash=b"",
        dtype="float32",
        kv_tokens=1,
        max_length=1,
        throughput_tokens_per_s=0.0,
        version="1",
        state=state,
    )


class TestPlacement:
    def test_blocks_win(self) -> None:
        told = settings(blocks="3:5")
        assert wanted_blocks(told) == 2
        assert place(told, 2, 10, SwarmSnapshot((), (), 0.0)) == Span(3, 5)

    def test_the_least_covered_blocks_are_taken(self) -> None:
        records = (record(0, 4), record(0, 7), record(4, 7, ServerState.JOINING))
        snapshot = SwarmSnapshot((*records, record(7, 10, ServerState.LEAVING)), (), 0.0)
        assert wanted_blocks(settings()) is None
        assert place(settings(num_blocks=3), 3, 10, snapshot) == Span(7, 10)

    def test_those_who_choose_together_take_turns(self) -> None:
        choosing = [
            replace(record(0, 5, ServerState.CHOOSING), peer=PeerId(name)) for name in ("a", "b")
        ]
        snapshot = SwarmSnapshot((*choosing, record(0, 5, ServerState.JOINING)), (), 0.0)
        assert settle(choosing[0], snapshot) == Span(5, 10)
        assert settle(choosing[1], snapshot) == Span(0, 5)
        # Its own older record, and those who already load, don't count twice.
        mine = replace(record(0, 5), peer=PeerId("c"))
        assert settle(mine, SwarmSnapshot((mine,), (), 0.0)) == Span(0, 5)


class TestDevice:
    def test_names(self) -> None:
        assert choose_device("cpu") == torch.device("cpu")
        assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
        with pytest.raises(SettingsError, match="use --device cpu"):
            choose_device("cuda:99")

    def test_free_memory_is_some_of_this_machine(self) -> None:
        assert 10**6 < free_bytes(torch.device("cpu")) < 10**14

    def test_measuring_leaves_the_pool_as_it_was(self) -> None:
        pool, model = CountingPool(20), AddingModel()
        assert decode_tokens_per_s(model, pool) > 0
        assert pool.free_tokens == 20
        assert {len(batch) for batch in model.batches} == {1}


class TestBackground:
    def test_results_and_errors_come_back(self) -> None:
        async def main() -> None:
            assert await in_background(threading.get_ident) != threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                await in_background(lambda: 1 // 0)

        asyncio.run(main())

    def test_cancelled_work_is_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bloombee.server.background.PATIENCE_S", 0.01)
        gate, ended = threading.Event(), threading.Event()

        def work() -> None:
            gate.wait(10)
            ended.set()

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(in_background(work))
                await asyncio.sleep(0.01)
                task.cancel()
            assert task.cancelled()

        asyncio.run(asyncio.wait_for(main(), 5))
        gate.set()
        assert ended.wait(5)


def test_a_peer_that_sends_too_fast_waits() -> None:
    throttle, peer, other = Throttle(10), PeerId("a"), PeerId("b")
    assert [throttle.delay_s(peer, 5.0) for _ in range(10)] == [0.0] * 10
    assert throttle.delay_s(peer, 5.0) == pytest.approx(0.1)
    assert throttle.delay_s(peer, 5.0) == pytest.approx(0.2)
    assert throttle.delay_s(other, 5.0) == 0.0
    assert throttle.delay_s(peer, 5.3) == pytest.approx(0.0)
    assert throttle.delay_s(peer, 100.0) == 0.0


def test_forgotten_peers_are_those_that_owe_nothing() -> None:
    throttle = Throttle(2)
    for number in range(FORGET_ABOVE):
        throttle.delay_s(PeerId(f"{number}"), 0.0)
    assert [throttle.delay_s(PeerId("busy"), 10.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    for number in range(FORGET_ABOVE):
        throttle.delay_s(PeerId(f"new {number}"), 10.0)
    assert throttle.delay_s(PeerId("busy"), 10.0) == 1.0


def test_any_number_of_busy_peers_takes_bounded_memory() -> None:
    """Those that owe most are remembered."""
    throttle, worst = Throttle(2), PeerId("worst")
    for _ in range(100):
        throttle.delay_s(worst, 0.0)
    for number in range(5 * FORGET_ABOVE):
        for _ in range(3):
            throttle.delay_s(PeerId(f"{number}"), 0.0)
        assert len(throttle) <= FORGET_ABOVE
    assert throttle.delay_s(worst, 0.0) == pytest.approx(49.5)


def test_a_full_window_waits_for_room() -> None:
    async def main() -> None:
        window = Window(100)
        await window.enter(500)
        async with asyncio.TaskGroup() as group:
            second = group.create_task(window.enter(60))
            await asyncio.sleep(0.01)
            assert not second.done()
            window.leave(500)
        await window.enter(40)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await window.enter(1)

    asyncio.run(main())
