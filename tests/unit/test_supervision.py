"""Restarts and their limits, calls that meet the end of a daemon, bugs that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import pytest

from bloombee.client.loop import LoopThread
from bloombee.core import PeerId
from bloombee.errors import SwarmError
from bloombee.server.executor import _call_all
from bloombee.server.tasks import BackgroundTasks
from bloombee.swarm import contact
from bloombee.swarm.addresses import PeerAddress, host_and_port
from bloombee.swarm.contact import Contact
from bloombee.swarm.restarts import RestartLimits, Restarts
from bloombee.swarm.supervisor import Life, Supervisor
from bloombee.telemetry.faults import is_ours

if TYPE_CHECKING:
    from bloombee.swarm.dht import Dht

QUICK = RestartLimits(tries=3, first_s=0.001, cap_s=0.002, steady_s=0.0)


# Restarts --------------------------------------------------------------------------------


def test_delays_double_up_to_a_cap_until_the_tries_are_used_up() -> None:
    restarts = Restarts(RestartLimits(tries=7))
    delays = [restarts.delay_s]
    for _ in range(7):
        restarts.failed()
        delays.append(restarts.delay_s)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, None]


def test_a_life_that_lasted_forgives_and_a_short_one_counts() -> None:
    restarts = Restarts(RestartLimits())
    for _ in range(4):
        restarts.died(1.0)
    assert restarts.failures == 4 and restarts.delay_s == 4.0
    restarts.died(60.0)
    assert restarts.delay_s == 0.0
    restarts.died(1.0)
    assert restarts.delay_s == 0.5


# The supervisor --------------------------------------------------------------------------


class FakeDaemon:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.last_words = "exit code -9, no message"
        self.control = "nowhere"
        self._ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def ended(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        self._ended.set()


class FakeDht:
    def __init__(self, name: int) -> None:
        self.name = name
        self.abandoned = False

    async def abandon(self) -> None:
        self.abandoned = True


def life(number: int) -> Life:
    return Life(cast("Any", FakeDaemon(number)), cast("Any", FakeDht(number)))


class Lives:
    """Begins lives 2, 3, ...; fails as often as told before each."""

    def __init__(self, *failures: int) -> None:
        self.failures = list(failures)
        self.begun: list[tuple[int, int]] = []

    async def begin(self, last: Life) -> Life:
        if self.failures and self.failures[0] > 0:
            self.failures[0] -= 1
            raise SwarmError("not yet")
        self.failures[:1] = []
        self.begun.append((last.daemon.pid, last.daemon.pid + 1))
        return life(last.daemon.pid + 1)


Check = Callable[[Supervisor, list[str]], Awaitable[None]]


def supervise(lives: Lives, check: Check) -> list[str]:
    """Run `check` beside a supervisor; returns what it was told of."""
    events: list[str] = []

    async def main() -> None:
        supervisor = Supervisor(life(1), lives.begin, 60.0, QUICK)

        async def keep() -> None:
            error = await supervisor.keep(
                lost=lambda: events.append("lost"), restarted=lambda: events.append("restarted")
            )
            events.append(str(error))
            supervisor.give_up(error)

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            keeping = group.create_task(keep())
            await check(supervisor, events)
            keeping.cancel()

    asyncio.run(main())
    return events


async def name_of(dht: Dht) -> int:
    return cast("Any", dht).name


def test_the_next_life_takes_the_place_of_the_last() -> None:
    lives = Lives(2)

    async def check(supervisor: Supervisor, events: list[str]) -> None:
        first = supervisor.life
        assert await supervisor.do(name_of) == 1
        supervisor.kill()
        assert await supervisor.do(name_of) == 2  # waits for it
        assert cast("Any", first.dht).abandoned

    assert supervise(lives, check) == ["lost", "restarted"]
    assert lives.begun == [(1, 2)]


def test_a_call_in_vain_is_made_again() -> None:
    """One that waits, one that fails, and one that found nothing, as the daemon dies."""
    asked: list[int] = []

    async def check(supervisor: Supervisor, events: list[str]) -> None:
        async def hangs(dht: Dht) -> int:
            name = await name_of(dht)
            asked.append(name)
            if name == 1:
                supervisor.kill()
                await asyncio.Event().wait()
            return name

        async def fails(dht: Dht) -> int:
            name = await name_of(dht)
            if name == 2:
                supervisor.kill()
                raise ConnectionResetError("daemon")
            return name

        async def finds_nothing(dht: Dht) -> list[int]:
            name = await name_of(dht)
            if name == 3:
                supervisor.kill()
                return []
            return [name]

        assert await supervisor.do(hangs) == 2
        assert await supervisor.do(fails) == 3
        assert await supervisor.do(finds_nothing) == [4]

    supervise(Lives(), check)
    assert asked == [1, 2]


def test_errors_that_are_not_the_daemons_are_raised() -> None:
    async def check(supervisor: Supervisor, events: list[str]) -> None:
        async def refused(dht: Dht) -> None:
            raise SwarmError("no DHT node took it")

        with pytest.raises(SwarmError, match="took it"):
            await supervisor.do(refused)

    assert supervise(Lives(), check) == []


def test_it_gives_up_after_failures_in_a_row_and_says_so_to_all() -> None:
    async def check(supervisor: Supervisor, events: list[str]) -> None:
        supervisor.kill()
        for _ in range(2):
            with pytest.raises(SwarmError, match="could not be started again"):
                await supervisor.do(name_of)

    events = supervise(Lives(3), check)
    assert events[0] == "lost" and "exit code -9" in events[1]


def test_a_daemon_that_was_asked_to_go_is_no_loss() -> None:
    async def check(supervisor: Supervisor, events: list[str]) -> None:
        supervisor.renew("it puts off dialing")
        assert await supervisor.do(name_of) == 2
        supervisor.renew("again")  # a moment ago: no
        assert await supervisor.do(name_of) == 2

    assert supervise(Lives(), check) == ["restarted"]


# Contact ---------------------------------------------------------------------------------


class LoneDht:
    """Knows nobody, and can't greet anyone for the reason given."""

    knows_peers = False

    def __init__(self, why: str) -> None:
        self.why = why
        self.greeted: list[str] = []

    async def greet(self, peer: PeerAddress) -> None:
        self.greeted.append(peer.peer)
        raise OSError(self.why)


@pytest.mark.parametrize("why", ["dial backoff", "no route"])
def test_only_a_dial_put_off_takes_another_daemon(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = PeerAddress(PeerId("a"), ("/ip4/192.0.2.1/tcp/1",))
    silent = PeerAddress(PeerId("b"), ("/ip4/192.0.2.2/tcp/1",))
    odd = PeerAddress(PeerId("c"), ("/ip4/192.0.2.3/udp/1/quic-v1",))

    async def takes_tcp(host: str, _port: int) -> bool:
        return host == "192.0.2.1"

    monkeypatch.setattr(contact, "_takes_tcp", takes_tcp)
    asked: list[str] = []
    dht = LoneDht(why)
    keeper = Contact((reached, silent, odd), 15.0, asked.append)
    with pytest.raises(SwarmError, match=why):
        asyncio.run(keeper.regain(cast("Any", dht)))
    assert sorted(dht.greeted) == ["a", "c"]  # b can't be reached: libp2p isn't asked to try
    assert len(asked) == (why == "dial backoff")


def test_a_node_without_initial_peers_may_be_alone() -> None:
    asyncio.run(Contact((), 15.0, pytest.fail).regain(cast("Any", LoneDht(""))))


def test_only_plain_tcp_is_probed() -> None:
    assert host_and_port("/dns/host/tcp/31") == ("host", 31)
    assert host_and_port("/ip6/::1/tcp/31") == ("::1", 31)
    for other in ("/ip4/1.2.3.4/udp/31", "/ip4/1.2.3.4/tcp/1/p2p/Q/p2p-circuit", "/ip4/1.2.3.4"):
        assert host_and_port(other) is None


# Bugs that nobody awaits -----------------------------------------------------------------


def test_a_bug_in_a_callback_of_ours_stops_the_server_and_no_other_does() -> None:
    async def main() -> None:
        tasks, loop = BackgroundTasks(), asyncio.get_running_loop()
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            failed = group.create_task(tasks.failed())
            await asyncio.sleep(0)
            loop.call_soon(lambda: {}["theirs"])
            loop.call_exception_handler({"message": "a stream's", "exception": ValueError("x")})
            await asyncio.sleep(0.01)
            assert not failed.done()
            loop.call_soon(_call_all, [lambda: {}["ours"]])
            assert repr(await failed) == "KeyError('ours')"
        assert loop.get_exception_handler() is None

    asyncio.run(main())


def test_a_delivery_that_raises_keeps_no_other_from_its_answer() -> None:
    delivered: list[int] = []

    async def main() -> None:
        failures: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.append(context)
        )
        deliveries = [lambda: delivered.append(1), lambda: 1 // 0, lambda: delivered.append(2)]
        asyncio.get_running_loop().call_soon(_call_all, deliveries)
        await asyncio.sleep(0.01)
        assert len(failures) == 1 and is_ours(failures[0]["exception"])

    asyncio.run(main())
    assert delivered == [1, 2]


def test_what_the_clients_loop_was_only_given_to_do_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails() -> None:
        raise ValueError("nobody waits")

    async def nothing() -> None:
        pass

    loop = LoopThread()
    with caplog.at_level(logging.ERROR):
        loop.post(fails())
        loop.run(nothing())
    loop.close()
    assert "nobody waits" in caplog.text
