"""`bloombee-status` against a real swarm: what the DHT says and what the servers say."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bloombee.cli import status
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from tests.e2e.dht_member import FINGERPRINT, record_of
from tests.e2e.dht_processes import Running, bootstrap, member

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def swarm() -> Iterator[Running]:
    with bootstrap() as boot, member(boot.maddrs):
        yield boot


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = status.main(flags)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_tells_models_servers_and_free_tokens(
    swarm: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = run(capsys, "--json", "--initial-peers", *swarm.maddrs)
    told = json.loads(output)
    assert code == 0 and told["warnings"] == []
    (model,) = told["models"]
    assert (model["model"], model["fingerprint"]) == ("tiny", FINGERPRINT)
    assert model["missing"] == ["10:30"] and model["coverage"] == [1] * 10 + [0] * 20
    (server,) = model["servers"]
    assert server["span"] == "0:10" and server["state"] == "online"
    assert (server["free_tokens"], server["kv_tokens"], server["sessions"]) == (321, 1000, 2)
    assert (server["waiting"], server["parked"]) == (3, 1)
    assert server["problem"] is None and 0 <= server["age_s"] < 12


def test_the_table_shows_gaps_and_unreachable_servers(
    swarm: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    async def publish(node: SwarmNode) -> None:
        # Nobody listens there.
        record = record_of(node.peer_id, 10, 20)
        await node.publish(replace(record, version="older"))

    async def started() -> SwarmNode:
        options = NodeOptions(initial_peers=swarm.maddrs)
        node = await SwarmNode.start(options, Identity.load_or_create(None))
        await publish(node)
        return node

    node = asyncio.run(started())
    try:
        code, output, _ = run(capsys, "--initial-peers", *swarm.maddrs)
    finally:
        asyncio.run(node.close())
    assert code == 0
    assert "missing 20:30" in output
    assert "1" * 20 + "." * 10 in output
    words = output.split()
    assert "2 (1 parked, 3 waiting)" in output
    assert "keeps 2.5 MB of prompts: 1,024 tokens saved in 4 sequences" in " ".join(words)
    assert "321/1,000" in words and "?/1,000" in words
    assert "different versions" in output
    assert f"{node.peer_id[-8:]} (127.0.0.1:9) can't be asked" in output


def test_mistakes_are_one_line(swarm: Running, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = run(capsys)
    assert code == 1 and output == "" and "--initial-peers" in errors
    code, output, errors = run(
        capsys, "--model", "other", "--initial-peers", *swarm.maddrs, "--log-level", "error"
    )
    assert code == 1 and output == ""
    assert "no server of this swarm serves 'other'; it serves: tiny" in errors
    assert len(errors.strip().splitlines()) == 1
