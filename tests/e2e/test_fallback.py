"""Servers that can't be reached directly are reached through libp2p, and relays if need be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
import uvloop
from transformers import AutoModelForCausalLM

from bloombee import AutoDistributedModelForCausalLM
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.errors import TransportError
from bloombee.swarm import daemon
from bloombee.swarm.daemon import Daemon, DaemonOptions
from bloombee.swarm.dht import P2PD
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.runtime_folder import RuntimeFolder
from bloombee.transport.p2p import P2PDialer, P2PListener
from bloombee.transport.p2p_control import DaemonControl
from tests.tiny import BLOCKS, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bloombee.transport.interface import Stream

ELSEWHERE = "192.0.0.200"
"""A reserved address that libp2p takes for a public one. Nothing is ever sent there."""


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections for as long as the block runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.timeout(120)
def test_a_model_generates_through_servers_whose_data_port_is_shut(tmp_path: Path) -> None:
    folder = str(tiny_model("llama", tmp_path))
    ids = torch.randint(3, 200, (2, 7), generator=torch.Generator().manual_seed(0))
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    local: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with closed_port() as shut:
        # The client finds both servers only through libp2p, and the first one the second.
        flags = ("--dtype", "float32", "--kv-tokens", "4096", "--log-level", "info")
        flags = (*flags, "--threads", "1", "--announce", f"127.0.0.1:{shut}")
        with LocalSwarm(folder, ["0:3", f"3:{BLOCKS}"], server_flags=flags) as swarm:
            assert {server.endpoint for server in swarm.servers} == {f"127.0.0.1:{shut}"}
            remote: Any = AutoDistributedModelForCausalLM.from_pretrained(
                folder, initial_peers=swarm.initial_peers, dtype="float32"
            )
            try:
                expected = local.generate(ids, **greedy)
                assert remote.generate(ids, **greedy).tolist() == expected.tolist()
                assert [str(stage.span) for stage in remote.route.stages] == ["0:3", "3:5"]
            finally:
                remote.close()
            said = swarm.children[1].log.read_text()
            assert f"no direct way to {swarm.servers[1].peer}" in said


async def dial_when_ready(dialer: P2PDialer, listener: P2PListener) -> Stream:
    """The hidden node needs a moment to get its slot at the relay."""
    async with asyncio.timeout(20.0):
        while True:
            with contextlib.suppress(TransportError):
                return await dialer.dial(listener.endpoint, 5.0)
            await asyncio.sleep(0.2)


async def hidden_daemon(relay: str) -> tuple[Daemon, Identity]:
    """A daemon that listens nowhere, as one behind NAT may as well do."""
    identity = Identity.load_or_create(None)
    options = DaemonOptions(
        binary=P2PD,
        listen=None,
        announce=None,
        private_key=identity.libp2p_private_key(),
        map_ports=False,
        relays=(relay,),
    )
    return await Daemon.start(options, RuntimeFolder.create()), identity


def test_a_node_with_an_announced_address_relays_to_one_that_listens_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a real NAT the daemon finds that out from its peers; on loopback it can't."""
    command = daemon._command
    size = 1 << 18  # A relay that isn't told that it is public ends a circuit at 128 KiB.

    async def echo(stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send([frame])

    async def main() -> None:
        with closed_port() as port:
            pass
        options = NodeOptions(port=port, announce=f"{ELSEWHERE}:{port}")
        relay = await SwarmNode.start(options, Identity.load_or_create(None))
        at, known_as = f"/ip4/127.0.0.1/tcp/{port}", f"/p2p/{relay.peer_id}"
        monkeypatch.setattr(
            daemon,
            "_command",
            lambda options, *rest: [
                *command(options, *rest),
                *(["-forceReachabilityPrivate=1", "-dhtServer=1"] if options.relays else []),
            ],
        )
        hidden, identity = await hidden_daemon(at + known_as)
        joining = NodeOptions(initial_peers=(at + known_as,), client_mode=True)
        client = await SwarmNode.start(joining, Identity.load_or_create(None))
        listener = P2PListener(hidden.control, identity.peer_id)
        dialer = P2PDialer(client.control)
        try:
            await DaemonControl(hidden.control).connect(relay.peer_id, (at,))
            await listener.start(echo)
            stream = await dial_when_ready(dialer, listener)
            for _ in range(3):
                await stream.send([bytes(size)])
                assert await stream.receive() == bytes(size)
            await stream.close()
        finally:
            await dialer.close()
            await listener.stop(0.0)
            hidden.kill()
            await client.close()
            await relay.close()

    uvloop.run(main())
