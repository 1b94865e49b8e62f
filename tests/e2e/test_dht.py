"""Discovery over real DHT nodes: seen at once, gone at once, past dead peers and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop

from bloombee.core import Span
from bloombee.errors import SettingsError, SwarmError
from bloombee.swarm.identity import Identity
from bloombee.swarm.keys import model_keys, span_keys
from bloombee.swarm.node import NodeOptions, SwarmNode
from tests.e2e.dht_member import FINGERPRINT, NUM_BLOCKS, record_of
from tests.e2e.dht_processes import Running, bootstrap, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from hivemind.dht.node import DHTNode

DEAD = "/ip4/127.0.0.1/tcp/9/p2p/"
DEAD_IPV6 = "/ip6/2001:db8::1/tcp/9/p2p/"


@pytest.fixture(scope="module")
def boot() -> Iterator[Running]:
    with bootstrap() as node:
        yield node


@contextlib.asynccontextmanager
async def a_node(*peers: str, **options: Any) -> AsyncGenerator[SwarmNode, None]:
    identity = options.pop("identity", None) or Identity.load_or_create(None)
    node = await SwarmNode.start(NodeOptions(initial_peers=peers, **options), identity)
    try:
        yield node
    finally:
        await node.close()


async def spans(node: SwarmNode) -> list[str]:
    snapshot = await node.snapshot(FINGERPRINT, NUM_BLOCKS)
    return [str(record.span) for record in snapshot.records]


def stranger_peer() -> str:
    return Identity.load_or_create(None).peer_id


def test_published_seen_moved_and_withdrawn(boot: Running) -> None:
    async def check() -> None:
        async with (
            a_node(*boot.maddrs) as one,
            a_node(*boot.maddrs) as two,
            a_node(*boot.maddrs, client_mode=True) as client,
        ):
            await one.publish(record_of(one.peer_id, 0, 10))
            await two.publish(record_of(two.peer_id, 10, 30))
            snapshot = await client.snapshot(FINGERPRINT)
            assert [record.peer for record in snapshot.records] == [one.peer_id, two.peer_id]
            assert snapshot.missing_text(NUM_BLOCKS) == ""
            assert abs(snapshot.records[0].published_at_s - time.time()) < 2
            overview = await client.snapshot()
            assert [(model.model, model.num_blocks) for model in overview.models] == [("tiny", 30)]
            assert client.maddrs == () and len(one.maddrs) == 1

            await one.publish(record_of(one.peer_id, 20, 30))
            assert await spans(client) == ["10:30", "20:30"]

            await two.withdraw()
            started = time.monotonic()
            assert await spans(client) == ["20:30"]
            assert time.monotonic() - started < 1
            await two.withdraw()  # once more does no harm
            await two.publish(record_of(two.peer_id, 0, 5))
            assert await spans(client) == ["0:5", "20:30"]
            await one.close()
            assert await spans(client) == ["0:5"]
        async with a_node(*boot.maddrs, client_mode=True) as client:
            assert (await client.snapshot()).models == ()

    # The server's main loop is uvloop.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())


def test_records_outlive_the_bootstrap_node_and_a_lost_key() -> None:
    async def check() -> None:
        with bootstrap() as boot:
            async with a_node(*boot.maddrs) as one, a_node(*boot.maddrs) as two:
                await one.publish(record_of(one.peer_id, 0, 10))
                assert await spans(two) == ["0:10"]
                boot.process.kill()
                assert await spans(two) == ["0:10"]
                async with a_node(*one.maddrs) as late:
                    assert await spans(late) == ["0:10"]
                    keys = [span_keys(FINGERPRINT, Span(0, 30))[0], model_keys()[0]]
                    for node in (one, two, late):
                        forget(node, keys)
                    snapshot = await late.snapshot(FINGERPRINT)
                    assert [str(record.span) for record in snapshot.records] == ["0:10"]

    asyncio.run(check())


def forget(node: SwarmNode, keys: list[str]) -> None:
    """Delete values from one DHT node, as if the nodes that held them were gone."""
    from hivemind.dht.routing import DHTID

    storage = node._member._supervisor.life.dht._node.protocol.storage
    for key in keys:
        del storage[DHTID.generate(source=key)]


def test_dead_initial_peers_are_skipped(boot: Running, caplog: pytest.LogCaptureFixture) -> None:
    dead, dead_ipv6 = DEAD + stranger_peer(), DEAD_IPV6 + stranger_peer()
    # Of a peer with several addresses one that works is enough.
    boot_peer = boot.maddrs[0].rpartition("/")[2]
    half_dead = (DEAD_IPV6 + boot_peer, boot.maddrs[0])

    async def check() -> None:
        started = time.monotonic()
        with caplog.at_level(logging.WARNING):
            async with a_node(dead, dead_ipv6, *half_dead) as node:
                assert time.monotonic() - started < 8
                assert await spans(node) == []

    asyncio.run(check())
    skipped = [message for message in caplog.messages if "is skipped" in message]
    assert len(skipped) == 2
    assert any("connection refused" in message for message in skipped)


def test_all_initial_peers_dead_is_one_clear_error() -> None:
    async def check() -> SwarmError:
        started = time.monotonic()
        with pytest.raises(SwarmError) as caught:
            async with a_node(DEAD + stranger_peer(), DEAD_IPV6 + stranger_peer()):
                pass
        assert time.monotonic() - started < 12
        return caught.value

    told = str(asyncio.run(check()))
    assert "none of the 2 initial peers answered" in told and "bloombee-dht" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:31337",
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/1/p2p/12D3",
        "/ip4/localhost/tcp/1/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/x/p2p/{peer}",
        "/ip9/127.0.0.1/tcp/1/p2p/{peer}",
    ],
)
def test_malformed_multiaddresses_come_with_an_example(text: str) -> None:
    async def check() -> None:
        async with a_node(text.format(peer=stranger_peer())):
            pass

    with pytest.raises(SettingsError, match=r"write it as /ip4/203\.0\.113\.5/tcp/31337/p2p/"):
        asyncio.run(check())


def test_taken_ports_and_identities_are_refused(boot: Running, tmp_path: Path) -> None:
    port = int(boot.maddrs[0].split("/")[4])
    identity = Identity.load_or_create(tmp_path / "identity")

    async def check() -> None:
        with pytest.raises(SettingsError, match=f"can't listen on .*{port}"):
            async with a_node(port=port):
                pass
        async with a_node(identity=identity):
            with pytest.raises(SettingsError, match="in use by another process"):
                async with a_node(identity=identity):
                    pass
        async with a_node(identity=identity) as node:  # free again
            assert node.peer_id == identity.peer_id

    asyncio.run(check())


def test_announced_addresses_are_what_others_get(boot: Running) -> None:
    async def check() -> None:
        async with a_node(*boot.maddrs, announce="localhost") as node:
            (maddr,) = node.maddrs
            assert maddr.startswith("/dns/localhost/tcp/")
            async with a_node(maddr) as other:
                await other.publish(record_of(other.peer_id, 0, 10))
                assert await spans(node) == ["0:10"]

    asyncio.run(check())


def test_strangers_neither_overwrite_nor_spoil(boot: Running) -> None:
    """A node without our validator stores junk under the keys of a model, and serves it."""

    async def plant(stranger: DHTNode, subkeys: list[Any]) -> list[bool]:
        keys = span_keys(FINGERPRINT, Span(0, 30))
        until = itertools.count(time.time() + 60)  # two equal expiries break hivemind itself
        return [
            await stranger.store(key, value, next(until), subkey=subkey)
            for key in keys
            for subkey in subkeys
            for value in (b"junk", "text", {"a": 1})
        ]

    async def check() -> None:
        async with a_node(*boot.maddrs) as honest, a_node(*boot.maddrs) as host:
            await honest.publish(record_of(honest.peer_id, 0, 10))
            # The stranger talks through another node's daemon, with hivemind's own rules.
            member = host._member

            async def attack() -> list[bool]:
                stranger = member._supervisor.life.dht._node
                stranger.protocol.record_validator = None
                from bloombee.swarm.identity import peer_id_bytes

                owner = peer_id_bytes(honest.peer_id)
                return await plant(stranger, ["no owner", None, owner, b"x", 7])

            await host._thread.run(attack(), "attack", 20)
            async with a_node(*boot.maddrs, client_mode=True) as client:
                assert await spans(client) == ["0:10"]
            await honest.publish(record_of(honest.peer_id, 0, 12))
            assert await spans(honest) == ["0:12"]

    asyncio.run(check())


def test_a_node_that_lost_everyone_rejoins(tmp_path: Path) -> None:
    """The only initial peer restarts with empty memory; the record comes back by itself."""
    keep = ("--identity", str(tmp_path / "identity"))

    async def check() -> None:
        with bootstrap(*keep) as boot:
            port = boot.maddrs[0].split("/")[4]
            async with a_node(*boot.maddrs, refresh_s=0.3) as node:
                await node.publish(record_of(node.peer_id, 0, 10))
                boot.process.kill()
                boot.process.wait()
                with bootstrap(*keep, "--dht-port", port) as again:
                    assert again.maddrs == boot.maddrs
                    async with a_node(*again.maddrs, client_mode=True) as client:

                        async def is_back() -> bool:
                            return await spans(client) == ["0:10"]

                        await eventually(is_back, 20)  # libp2p waits 5 s between dials

    asyncio.run(check())


def test_values_are_msgpack_as_the_validator_expects() -> None:
    """hivemind's serializer and ours agree on bytes, which the validator relies on."""
    from hivemind.utils import MSGPackSerializer

    assert MSGPackSerializer.dumps(b"value") == msgspec.msgpack.encode(b"value")
