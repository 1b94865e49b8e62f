"""The server as a process: what it says, where it goes, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from bloombee.core import Span
from bloombee.models import open_source
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.records import ServerRecord, ServerState
from tests.e2e.dht_processes import START_S, bootstrap, running, spawn, wait_until
from tests.tiny import BLOCKS, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.dht_processes import Running

SERVER = ("-m", "bloombee.cli.server")
LOCAL = ("--host", "127.0.0.1", "--threads", "1", "--kv-tokens", "4096")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def boot() -> Iterator[Running]:
    with bootstrap() as node:
        yield node


def records(peers: tuple[str, ...], folder: Path) -> list[ServerRecord]:
    """What the swarm says about the servers of the model, by first block."""
    fingerprint = open_source(str(folder)).fingerprint

    async def main() -> list[ServerRecord]:
        options = NodeOptions(initial_peers=peers, client_mode=True)
        node = await SwarmNode.start(options, Identity.load_or_create(None))
        try:
            return list((await node.snapshot(fingerprint, BLOCKS)).records)
        finally:
            await node.close()

    return sorted(asyncio.run(main()), key=lambda record: record.span)


def test_servers_take_what_is_missing_and_leave_at_once(folder: Path, boot: Running) -> None:
    flags = (*LOCAL, "--model", str(folder), "--initial-peers", *boot.maddrs)
    with (
        running(*SERVER, *flags, "--blocks", "0:2", "--ready-file", "READY_FILE") as first,
        running(*SERVER, *flags, "--num-blocks", "3", "--ready-file", "READY_FILE") as second,
    ):
        found = records(boot.maddrs, folder)
        assert [record.span for record in found] == [Span(0, 2), Span(2, BLOCKS)]
        for record in found:
            assert record.state is ServerState.ONLINE
            assert record.kv_tokens == 4096
            assert record.throughput_tokens_per_s > 1
            assert len(record.certificate_hash) == 32
            assert record.model == folder.name
            host, _, port = record.addresses[0].rpartition(":")
            assert host == "127.0.0.1" and int(port) > 0
        for server, how in ((first, signal.SIGTERM), (second, signal.SIGINT)):
            children = server.children
            assert [child.name() for child in children] == ["p2pd"]
            server.process.send_signal(how)
            wait_until(lambda server=server: server.process.poll() is not None, 5.0)
            assert server.process.returncode == 0
            assert not any(child.is_running() for child in children)
            output, errors = server.process.communicate()
            ready, left = output.splitlines()
            assert ready.startswith("ready: serving blocks ")
            assert left == f"left: blocks {ready.split()[3]} of {folder.name}, served no more"
            assert "memory on cpu: " in errors and "Traceback" not in errors
        assert records(boot.maddrs, folder) == []


def test_servers_started_together_share_the_blocks(folder: Path, boot: Running) -> None:
    flags = (*LOCAL, "--model", str(folder), "--initial-peers", *boot.maddrs)
    servers = [spawn(*SERVER, *flags, "--num-blocks", "2") for _ in range(3)]
    try:

        def covered() -> bool:
            found = records(boot.maddrs, folder)
            return {block for r in found for block in range(r.span.start, r.span.end)} == set(
                range(BLOCKS)
            ) and all(r.state is ServerState.ONLINE for r in found)

        wait_until(covered, START_S)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.communicate(timeout=10)
    assert [server.returncode for server in servers] == [0, 0, 0]


def test_the_ready_file_says_all_there_is_to_know(folder: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    flags = ("--model", str(folder), "--new-swarm", "--ready-file", str(ready))
    process = spawn(*SERVER, *LOCAL, *flags)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, START_S)
        told = json.loads(ready.read_text())
        assert set(told) >= {"peer", "maddrs", "endpoint", "span", "pid"}
        assert told["span"] == f"0:{BLOCKS}"
        assert told["pid"] == process.pid
        assert told["maddrs"][0].endswith(f"/p2p/{told['peer']}")
    finally:
        process.kill()
        process.communicate()


def test_told_to_stop_while_it_starts(folder: Path) -> None:
    process = spawn(*SERVER, *LOCAL, "--model", str(folder), "--new-swarm")
    try:
        wait_until(lambda: bool(psutil.Process(process.pid).children()), START_S)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, 5.0)
        assert process.returncode == 0
        assert "Traceback" not in process.communicate()[1]
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--new-swarm",), 2, "--model"),
        (("--model", "MODEL"), 2, "--new-swarm"),
        (("--model", "MODEL", "--new-swarm", "--blocks", "7"), 2, "START:END"),
        (("--model", "MODEL", "--new-swarm", "--blocks", "0:99"), 1, "0:5"),
    ],
)
def test_mistakes_are_told_in_one_line(
    folder: Path, flags: tuple[str, ...], code: int, says: str
) -> None:
    process = spawn(*SERVER, *(str(folder) if flag == "MODEL" else flag for flag in flags))
    try:
        _, errors = process.communicate(timeout=START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, errors
    lines = [line for line in errors.splitlines() if line.startswith("bloombee-server: ")]
    assert len(lines) == 1 and says in lines[0], errors
    assert "Traceback" not in errors
