"""However a process of the swarm ends, nothing of it stays: no daemon, no record, no files."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from bloombee.swarm import tether
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.runtime_folder import RuntimeFolder, remove_stale
from tests.e2e.dht_member import FINGERPRINT, NUM_BLOCKS
from tests.e2e.dht_processes import (
    SHIFTED_CLOCK,
    Running,
    bootstrap,
    eventually,
    member,
    running,
    spawn,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def boot() -> Iterator[Running]:
    with bootstrap() as node:
        yield node


def sockets_of(process: psutil.Process) -> Path:
    """The runtime folder of a p2pd, from its command line."""
    control = next(w for w in process.cmdline() if w.startswith("-listen=/unix"))
    return Path(control.removeprefix("-listen=/unix")).parent


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_a_node_leaves_nothing(how: signal.Signals) -> None:
    with bootstrap() as node:
        children = node.children
        assert [child.name() for child in children] == ["p2pd"]
        sockets = sockets_of(children[0])
        assert sockets.is_dir() and sockets.stat().st_mode & 0o777 == 0o700
        node.process.send_signal(how)
        output, errors = node.process.communicate(timeout=5)
        assert node.process.returncode == 0 and "Traceback" not in errors
        assert output.startswith("ready: join with --initial-peers /ip4/127.0.0.1/tcp/")
        assert gone(children) and not sockets.exists()


def test_killed_it_leaves_no_daemon_and_its_record_expires(boot: Running) -> None:
    async def check() -> None:
        options = NodeOptions(initial_peers=boot.maddrs, client_mode=True)
        client = await SwarmNode.start(options, Identity.load_or_create(None))

        async def is_seen() -> bool:
            return bool((await client.snapshot(FINGERPRINT, NUM_BLOCKS)).records)

        try:
            with member(boot.maddrs, lifetime_s=3.0, refresh_s=1.0) as killed:
                children = killed.children
                sockets = sockets_of(children[0])
                # Seen for longer than one lifetime, so it was refreshed.
                for _ in range(8):
                    assert await is_seen()
                    await asyncio.sleep(0.5)
                killed.process.kill()
                await asyncio.to_thread(wait_until, lambda: gone(children), 1.0)

                async def is_gone() -> bool:
                    return not await is_seen()

                await eventually(is_gone, 4.0)
            # Its sockets go when the next process of ours starts.
            assert sockets.exists()
            RuntimeFolder.create().remove()
            assert not sockets.exists()
        finally:
            await client.close()

    asyncio.run(check())


def test_sigterm_withdraws_the_record_at_once(boot: Running) -> None:
    async def check() -> None:
        options = NodeOptions(initial_peers=boot.maddrs, client_mode=True)
        client = await SwarmNode.start(options, Identity.load_or_create(None))
        try:
            with member(boot.maddrs) as stopped:
                assert len((await client.snapshot(FINGERPRINT, NUM_BLOCKS)).records) == 1
                children = stopped.children
                stopped.process.terminate()

                async def is_gone() -> bool:
                    return not (await client.snapshot(FINGERPRINT, NUM_BLOCKS)).records

                await eventually(is_gone, 1.0)
                assert await asyncio.to_thread(stopped.process.wait, 5) == 0
                assert gone(children)
        finally:
            await client.close()

    asyncio.run(check())


def test_a_program_that_never_closes_its_node_ends_cleanly() -> None:
    code = (
        "import asyncio\n"
        "from bloombee.swarm.identity import Identity\n"
        "from bloombee.swarm.node import NodeOptions, SwarmNode\n"
        "options = NodeOptions()\n"
        "node = asyncio.run(SwarmNode.start(options, Identity.load_or_create(None)))\n"
        "daemon = node._member._supervisor.life.daemon\n"
        "print(daemon.pid, daemon.folder)\n"
    )
    process = spawn("-W", "ignore::DeprecationWarning", "-c", code)
    output, errors = process.communicate(timeout=60)
    pid, folder = output.split()
    assert process.returncode == 0 and errors == ""
    assert not psutil.pid_exists(int(pid)) and not Path(folder).exists()


@pytest.mark.parametrize(("shift_s", "told"), [(-7, "7.0 s behind"), (6, "6.0 s ahead")])
def test_a_clock_some_seconds_off_is_named_and_works(
    boot: Running, shift_s: int, told: str
) -> None:
    code = SHIFTED_CLOCK.format(shift=shift_s) + (
        "import sys; from bloombee.cli.dht import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ("--host", "127.0.0.1", "--dht-port", "0", "--ready-file", "READY_FILE")
    with running("-c", code, *flags, "--initial-peers", *boot.maddrs) as node:
        node.process.terminate()
        _, errors = node.process.communicate(timeout=5)
        assert node.process.returncode == 0
    warned = [line for line in errors.splitlines() if "clock" in line]
    # The skew is measured to within a round trip.
    assert len(warned) == 1 and (told in warned[0] or _one_tenth_off(told, warned[0]))
    assert "NTP" in warned[0]


def _one_tenth_off(told: str, warning: str) -> bool:
    seconds, _, direction = told.partition(" s ")
    near = [f"{float(seconds) + step:.1f} s {direction}" for step in (-0.1, 0.1)]
    return any(text in warning for text in near)


def test_a_clock_far_off_is_refused_with_the_mend(boot: Running) -> None:
    code = SHIFTED_CLOCK.format(shift=-60) + (
        "import sys; from bloombee.cli.dht import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ("--host", "127.0.0.1", "--dht-port", "0", "--initial-peers", *boot.maddrs)
    process = spawn("-c", code, *flags)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("bloombee-dht: the clock of this machine is 60.0 s behind")
    assert "NTP" in last and "Traceback" not in errors


# The tether ------------------------------------------------------------------------


# Only Linux has parent-death signals.
MODES = ["pipe", "signal"] if sys.platform == "linux" else ["pipe"]


@pytest.mark.parametrize("mode", MODES)
def test_the_tether_holds_when_the_parent_is_killed(mode: str) -> None:
    """Mode `pipe`, for systems without parent-death signals, works here as well."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tether.__file__), mode],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: "sleep" in _names(process), 10)
    family = [process, *process.children(recursive=True)]
    parent.kill()
    parent.communicate()
    wait_until(lambda: gone(family), 1.0)


_PARENT = """
import os, subprocess, sys
read, write = os.pipe()
child = subprocess.Popen(
    [sys.executable, "-I", "-S", *sys.argv[1:], str(os.getpid()), str(read), "/bin/sleep", "60"],
    pass_fds=(read,), stdout=subprocess.DEVNULL,
)
os.close(read)
print(child.pid, flush=True)
child.wait()
"""


def _names(process: psutil.Process) -> list[str]:
    return [p.name() for p in (process, *process.children(recursive=True))]


def test_only_folders_of_dead_processes_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = RuntimeFolder.create()
    stale = tmp_path / "bloombee-p2p-stale"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "control.sock").touch()
    unrelated = tmp_path / "bloombee-p2p-unrelated"
    unrelated.mkdir()
    remove_stale(tmp_path)
    assert mine.path.is_dir() and unrelated.is_dir() and not stale.exists()
    assert os.listdir(mine.path) == ["lock"]
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
