"""What dies or is cut off comes back by itself: libp2p daemons, records, the view of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from bloombee import AutoDistributedModelForCausalLM
from bloombee.cli.child import Place
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.errors import BloomBeeError
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from tests.e2e.dht_member import FINGERPRINT, NUM_BLOCKS, record_of
from tests.e2e.dht_processes import bootstrap, eventually, member, wait_until
from tests.e2e.namespaces import Network, need_namespaces
from tests.e2e.test_fallback import closed_port
from tests.tiny import BLOCKS, tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

BACK_S = 5.0
"""For a daemon that was killed to serve again; it takes 0.7 s on an idle machine."""
REGAINED_S = 15.0
"""From the end of an outage to the record being read again."""


@contextlib.asynccontextmanager
async def a_node(*peers: str, **options: Any) -> AsyncGenerator[SwarmNode, None]:
    identity = Identity.load_or_create(None)
    node = await SwarmNode.start(NodeOptions(initial_peers=peers, **options), identity)
    try:
        yield node
    finally:
        await node.close()


def daemon_of(pid: int) -> psutil.Process | None:
    """The libp2p daemon of a process, if it has a living one."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "p2pd" and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def own_daemon(node: SwarmNode) -> int:
    return node._member._supervisor.life.daemon.pid


def replaced(pid: int, old: psutil.Process) -> bool:
    daemon = daemon_of(pid)
    return daemon is not None and daemon.pid != old.pid


def kill_daemon(pid: int) -> None:
    """kill -9, and wait for the next."""
    old = daemon_of(pid)
    assert old is not None
    old.kill()
    wait_until(lambda: replaced(pid, old), BACK_S)


def generated_at_last(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> list[list[int]]:
    """What it generates, once whatever it needs is back."""
    generated: list[list[int]] = []

    def works() -> bool:
        with contextlib.suppress(BloomBeeError):
            generated[:] = model.generate(ids, **options).tolist()
        return bool(generated)

    wait_until(works, BACK_S)
    return generated


async def spans(node: SwarmNode) -> list[str]:
    snapshot = await node.snapshot(FINGERPRINT, NUM_BLOCKS)
    return [str(record.span) for record in snapshot.records]


# Daemons ---------------------------------------------------------------------------------


@pytest.mark.timeout(150)
def test_a_model_generates_whosever_daemon_is_killed(tmp_path: Path) -> None:
    """All streams of this swarm go through the daemons, which have to know of the listeners."""
    folder = str(tiny_model("llama", tmp_path))
    ids = torch.randint(3, 200, (1, 7), generator=torch.Generator().manual_seed(0))
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    with closed_port() as shut:
        flags = ("--dtype", "float32", "--kv-tokens", "4096", "--threads", "1")
        flags = (*flags, "--announce", f"127.0.0.1:{shut}")
        with LocalSwarm(folder, ["0:3", f"3:{BLOCKS}"], server_flags=flags) as swarm:
            remote: Any = AutoDistributedModelForCausalLM.from_pretrained(
                folder, initial_peers=swarm.initial_peers, dtype="float32"
            )
            try:
                expected = remote.generate(ids, **greedy).tolist()
                assert swarm.dht is not None
                for victim in (swarm.dht.pid, swarm.servers[1].pid, os.getpid()):
                    kill_daemon(victim)
                    assert generated_at_last(remote, ids, greedy) == expected
                # One that knows nothing yet finds all of it, by the first node alone.
                newcomer: Any = AutoDistributedModelForCausalLM.from_pretrained(
                    folder, initial_peers=swarm.initial_peers, dtype="float32"
                )
                assert newcomer.generate(ids, **greedy).tolist() == expected
                newcomer.close()
            finally:
                remote.close()
            for child in swarm.children[:1] + swarm.children[2:]:
                said = child.log.read_text()
                assert said.count("the libp2p daemon") == 1 and "exit code -9" in said
                assert said.count("in touch with the swarm again") == 1


def test_daemons_come_back_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    """Same addresses, record and neighbours, also for the first node, which was given none."""

    async def check() -> None:
        async with (
            a_node() as first,
            a_node(*first.maddrs) as server,
            a_node(*first.maddrs, client_mode=True) as client,
        ):
            await server.publish(record_of(server.peer_id, 0, 10))
            # What the first node remembers of its neighbours it learns at each refresh.
            await first._thread.run(
                first._member._contact.keep(first._member._supervisor.life.dht), "keep", 5
            )
            descriptors = len(os.listdir("/proc/self/fd"))
            for node in (first, server, client):
                before, addresses = own_daemon(node), node.maddrs
                os.kill(before, signal.SIGKILL)
                # A call that meets the end of the daemon waits for the next.
                assert await spans(node) == ["0:10"]

                async def is_back(node: SwarmNode = node, before: int = before) -> bool:
                    return own_daemon(node) != before

                await eventually(is_back, BACK_S)
                assert node.maddrs == addresses
                async with a_node(*first.maddrs, client_mode=True) as newcomer:
                    assert await spans(newcomer) == ["0:10"]
            await eventually(lambda: no_more_than(descriptors), 3.0)

    with caplog.at_level(logging.WARNING, "bloombee"):
        asyncio.run(check())
    lost = [message for message in caplog.messages if "exit code -9" in message]
    regained = [
        message for message in caplog.messages if message == "in touch with the swarm again"
    ]
    assert (len(lost), len(regained), len(caplog.messages)) == (3, 3, 6)


async def no_more_than(descriptors: int) -> bool:
    return len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_daemon_that_hangs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with a_node(probe_s=0.3) as first, a_node(*first.maddrs) as server:
            await server.publish(record_of(server.peer_id, 0, 10))
            before = own_daemon(first)
            os.kill(before, signal.SIGSTOP)

            async def is_back() -> bool:
                return own_daemon(first) != before

            await eventually(is_back, BACK_S)
            assert await spans(first) == ["0:10"]

    with caplog.at_level(logging.WARNING, "bloombee"):
        asyncio.run(check())
    assert any("no longer answered" in message for message in caplog.messages)


# Outages ---------------------------------------------------------------------------------


def test_a_first_node_with_empty_memory_is_found_by_all(tmp_path: Path) -> None:
    """Two servers that have each other are not alone, and still meet the first node again."""
    keep = ("--identity", str(tmp_path / "identity"))

    async def check() -> None:
        with bootstrap(*keep) as boot:
            port = boot.maddrs[0].split("/")[4]
            async with (
                a_node(*boot.maddrs, refresh_s=0.5) as one,
                a_node(*boot.maddrs, refresh_s=0.5) as two,
            ):
                await one.publish(record_of(one.peer_id, 0, 10))
                await two.publish(record_of(two.peer_id, 10, 30))
                boot.process.kill()
                boot.process.wait()
                with bootstrap(*keep, "--dht-port", port) as again:
                    async with a_node(*again.maddrs, client_mode=True) as client:

                        async def all_are_seen() -> bool:
                            return await spans(client) == ["0:10", "10:30"]

                        await eventually(all_are_seen, REGAINED_S)

    asyncio.run(check())


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """This process, and a host whose link can be cut."""
    need_namespaces()
    with Network("away") as network:
        yield network


@pytest.mark.timeout(120)
def test_a_record_comes_back_after_an_outage_longer_than_its_life(network: Network) -> None:
    lifetime_s, outage_s = 3.0, 9.0

    async def check() -> None:
        with bootstrap(place=Place(network.here)) as boot:
            place = network.place("away")
            with member(boot.maddrs, lifetime_s, lifetime_s / 4, place):
                async with a_node(*boot.maddrs, client_mode=True) as client:
                    assert await spans(client) == ["0:10"]
                    network.cut("away")
                    cut_s = time.monotonic()

                    async def is_gone() -> bool:
                        return await spans(client) == []

                    await eventually(is_gone, lifetime_s + 4)
                    await asyncio.sleep(outage_s - (time.monotonic() - cut_s))
                    network.mend("away")

                    async def is_back() -> bool:
                        return await spans(client) == ["0:10"]

                    await eventually(is_back, REGAINED_S)

    asyncio.run(check())


@pytest.mark.timeout(120)
def test_a_client_that_was_cut_off_sees_the_swarm_again(network: Network) -> None:
    async def check() -> None:
        place = network.place("away")
        # The rest of the swarm is what is away from the client.
        with bootstrap(place=place) as boot, member(boot.maddrs, 4.0, 1.0, place):
            async with a_node(*boot.maddrs, client_mode=True) as client:
                assert await spans(client) == ["0:10"]
                network.cut_here()
                until_s = time.monotonic() + 8.0
                while time.monotonic() < until_s:
                    with contextlib.suppress(BloomBeeError):
                        assert await spans(client) == []
                    await asyncio.sleep(0.5)
                network.mend_here()

                async def is_back() -> bool:
                    with contextlib.suppress(BloomBeeError):
                        return await spans(client) == ["0:10"]
                    return False

                await eventually(is_back, REGAINED_S)

    asyncio.run(check())
