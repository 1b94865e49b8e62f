"""Servers that are told to stop in mid-generation: nothing is lost, and they are gone in time.

Real processes. The first half of the model has one holder, so its sessions can't move;
the second half has two, between which they do.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from bloombee.cli.local_swarm import LocalSwarm
from bloombee.cli.status import show
from bloombee.config.settings import StatusSettings
from tests.e2e.dht_processes import ROOT, wait_until
from tests.e2e.disturbances import (
    GREEDY,
    MODEL,
    SERVER_FLAGS,
    AtToken,
    client_of,
    prompt,
    revive,
    stages,
    wait_free,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SPANS = ("0:15", "15:30", "15:30")
ONLY = 0
DRAIN_S = 15.0
DRAINS = "handing 1 sessions over"
LEFT_S = 6.0
"""What a server may take to be gone once its sessions are, on a busy machine."""
COLUMNS, NEW, AT = 300, 24, 8


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A state folder of our own: `--drain` would find the servers of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def swarm(state: None) -> Iterator[LocalSwarm]:
    flags = (*SERVER_FLAGS, "--drain-s", str(DRAIN_S))
    with LocalSwarm(MODEL, SPANS, server_flags=flags) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: LocalSwarm) -> Iterator[Any]:
    with client_of(swarm) as model:
        yield model


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """What the swarm answers when nothing happens to it."""
    return model.generate(prompt(COLUMNS), max_new_tokens=NEW, **GREEDY).tolist()


def generate(model: Any, happen: Callable[[], object]) -> list[list[int]]:
    at = AtToken(AT, happen)
    found = model.generate(
        prompt(COLUMNS), max_new_tokens=NEW, logits_processor=at.processors, **GREEDY
    )
    return found.tolist()


def tell_to_stop(swarm: LocalSwarm, index: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Signal a server that has a session, and wait until it drains."""
    server = swarm.server(index)
    before = server.log.read_text().count(DRAINS)
    server.signal(signum)
    wait_until(lambda: server.log.read_text().count(DRAINS) > before, 10.0)


def ended(swarm: LocalSwarm, index: int, deadline_s: float) -> int:
    """The exit code of a server that is to end within `deadline_s`."""
    wait_until(lambda: not swarm.server(index).is_running, deadline_s)
    return swarm.server(index).process.returncode


def drain(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bloombee.cli.server", "--drain", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DRAIN_S + 60,
        check=False,
    )


def shown_state(swarm: LocalSwarm, index: int, capsys: pytest.CaptureFixture[str]) -> str:
    """A server's state as `bloombee-status` shows it; in this process, which is quicker."""
    capsys.readouterr()
    asyncio.run(show(StatusSettings(initial_peers=tuple(swarm.initial_peers), json=True)))
    told = json.loads(capsys.readouterr().out)
    states = {server["peer"]: server["state"] for m in told["models"] for server in m["servers"]}
    return states[swarm.servers[index].peer]


def test_told_to_stop_between_two_tokens(
    swarm: LocalSwarm, model: Any, expected: list[list[int]]
) -> None:
    """Its session moves to the other holder, and it ends at once."""
    victims: list[int] = []

    def stop() -> None:
        victims.append(stages(swarm, model)[1])
        tell_to_stop(swarm, victims[0])

    assert generate(model, stop) == expected
    (victim,) = victims
    assert stages(swarm, model) == [ONLY, 3 - victim]
    assert ended(swarm, victim, LEFT_S) == 0
    assert "Traceback" not in swarm.server(victim).log.read_text()
    assert "took over a session" in swarm.server(3 - victim).log.read_text()
    wait_free(swarm)


def test_the_only_holder_serves_to_the_end(
    swarm: LocalSwarm,
    model: Any,
    expected: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The swarm sees that it is leaving; its session goes on until it is over."""
    revive(swarm)
    seen: list[str] = []

    def stop() -> None:
        seen.append(shown_state(swarm, ONLY, capsys))
        tell_to_stop(swarm, ONLY)
        wait_until(lambda: shown_state(swarm, ONLY, capsys) == "leaving", DRAIN_S / 2)
        seen.append(shown_state(swarm, ONLY, capsys))

    assert generate(model, stop) == expected
    assert seen == ["online", "leaving"]
    assert ended(swarm, ONLY, LEFT_S) == 0


def test_a_second_signal_ends_at_once(swarm: LocalSwarm, model: Any) -> None:
    revive(swarm)
    server = swarm.server(ONLY)
    with model.inference_session(max_length=64):
        model.generate(prompt(8), max_new_tokens=2, **GREEDY)
        tell_to_stop(swarm, ONLY)
        assert server.is_running
        server.signal(signal.SIGTERM)
        assert ended(swarm, ONLY, 1.0) == -signal.SIGTERM


def test_the_command_drains_one_server(
    swarm: LocalSwarm, model: Any, expected: list[list[int]]
) -> None:
    revive(swarm)
    with ThreadPoolExecutor(1) as pool:
        asked: list[Any] = []

        def stop() -> None:
            pid = str(swarm.server(stages(swarm, model)[1]).process.pid)
            asked.append((pid, pool.submit(drain, "--pid", pid)))

        assert generate(model, stop) == expected
        pid, draining = asked[0]
        found = draining.result(60)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[0].startswith(f"draining pid {pid} ({MODEL})")
    assert found.stdout.splitlines()[-1].startswith(f"pid {pid} is gone after ")
    assert [swarm.server(index).is_running for index in range(3)].count(False) == 1


def test_the_command_drains_all(swarm: LocalSwarm, model: Any) -> None:
    """The last test. One has a session that can't move: it is waited for, and left behind."""
    revive(swarm)
    own = {str(swarm.server(index).process.pid) for index in range(3)}
    with model.inference_session(max_length=64):
        model.generate(prompt(8), max_new_tokens=2, **GREEDY)
        started = time.monotonic()
        found = drain()
        took = time.monotonic() - started
    assert (found.returncode, found.stderr) == (0, "")
    assert DRAIN_S <= took < DRAIN_S + 4 * LEFT_S
    gone = {line.split()[1] for line in found.stdout.splitlines() if " is gone after " in line}
    assert gone == own
    assert [ended(swarm, index, 1.0) for index in range(3)] == [0, 0, 0]
    none = drain()
    assert none.returncode == 1
    assert none.stderr == "bloombee-server: --drain: no server of yours runs on this machine\n"
