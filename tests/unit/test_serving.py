"""What long-running commands share: ready file, swarm key, signals to an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bloombee.cli.serving import ReadyReport, read_swarm_key, run_until_stopped, write_ready_file
from bloombee.errors import SettingsError, SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_ready_file_is_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(path, ReadyReport("p", ("/ip4/1/tcp/2/p2p/p",), 7, "127.0.0.1:5", "0:10"))
    assert json.loads(path.read_text()) == {
        "peer": "p",
        "maddrs": ["/ip4/1/tcp/2/p2p/p"],
        "pid": 7,
        "endpoint": "127.0.0.1:5",
        "span": "0:10",
    }
    assert os.listdir(tmp_path) == ["ready.json"]
    with pytest.raises(SettingsError, match="--ready-file: can't write"):
        write_ready_file(tmp_path / "no" / "folder", ReadyReport("p", (), 1))


def test_swarm_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert read_swarm_key(None) is None
    with pytest.raises(SettingsError, match="can't read"):
        read_swarm_key(path)
    path.write_text("short\n")
    with pytest.raises(SettingsError, match="5 bytes.*openssl"):
        read_swarm_key(path)
    path.write_text("0123456789abcdef\n")
    assert read_swarm_key(path) == b"0123456789abcdef"


@pytest.fixture
def handlers_kept() -> Iterator[None]:
    """A process that is told to stop ends; this one goes on."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_work_in_order(signum: signal.Signals) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signum)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    assert run_until_stopped("test", work()) == 0
    assert seen == ["cleaned up"]


@pytest.mark.usefixtures("handlers_kept")
def test_a_signal_to_drain_may_come_again() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.01)
            seen.append("cleaned up")

    assert run_until_stopped("test", work(), also=signal.SIGUSR1) == 0
    assert seen == ["cleaned up"]


STUBBORN = """
import asyncio, sys
from bloombee.cli.serving import run_until_stopped

async def work():
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaning", flush=True)
        await asyncio.sleep(60)

sys.exit(run_until_stopped("test", work()))
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(second: signal.Signals) -> None:
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"cleaning\n"
        process.send_signal(second)
        assert process.wait(2) == -second
        assert process.stderr.read() == b""


def test_errors_are_one_line_and_others_are_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail(error: Exception) -> None:
        raise error

    assert run_until_stopped("test", fail(SwarmError("nobody; call someone"))) == 1
    assert capsys.readouterr().err == "test: nobody; call someone\n"
    with pytest.raises(ZeroDivisionError):
        run_until_stopped("test", fail(ZeroDivisionError()))
