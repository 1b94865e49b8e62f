"""How `--drain` finds servers, tells them, and waits: with processes that only sleep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from bloombee.cli import drain as drain_module
from bloombee.cli.drain import drain
from bloombee.cli.running import registered, running_servers
from bloombee.cli.server import main
from bloombee.errors import DeadlineExceeded, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER = """
import signal, sys
from bloombee.cli.running import registered
stopped = []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(1))
with registered(sys.argv[1], float(sys.argv[2])):
    print("ready", flush=True)
    while not stopped or sys.argv[3] == "deaf":
        signal.sigtimedwait([signal.SIGALRM], 0.02)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "bloombee" / "servers"


class Servers:
    """Processes that register as servers do."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, model: str, drain_s: float = 30.0, how: str = "obeys") -> int:
        command = [sys.executable, "-c", SERVER, model, str(drain_s), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process.pid


@pytest.fixture
def servers() -> Iterator[Servers]:
    started = Servers()
    yield started
    for process in started.started:
        process.kill()
        process.communicate()


def test_a_server_is_found_while_it_runs(state: Path) -> None:
    assert running_servers() == []
    with registered("llama", 7.0):
        (found,) = running_servers()
        assert (found.pid, found.model, found.drain_s) == (os.getpid(), "llama", 7.0)
        assert found.process == psutil.Process()
        assert [path.stat().st_mode & 0o777 for path in state.iterdir()] == [0o600]
    assert running_servers() == []
    assert list(state.iterdir()) == []


def test_what_a_killed_server_left_is_removed(state: Path, servers: Servers) -> None:
    servers.start("llama")
    servers.started[0].kill()
    assert servers.started[0].wait() == -signal.SIGKILL
    assert len(list(state.iterdir())) == 1
    assert running_servers() == []
    assert list(state.iterdir()) == []


def test_another_process_with_the_same_pid_is_left_alone(state: Path, servers: Servers) -> None:
    pid = servers.start("llama")
    (file,) = state.iterdir()
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "began_s": told["began_s"] - 1000}))
    assert running_servers() == []
    with pytest.raises(SettingsError, match="no server of yours runs"):
        drain(None, print)
    assert psutil.Process(pid).is_running()
    file.write_text("nonsense")
    assert running_servers() == []


def test_draining_tells_all_and_waits(servers: Servers) -> None:
    first, second = servers.start("llama"), servers.start("qwen")
    said: list[str] = []
    drain(None, said.append)
    assert [process.wait(0) for process in servers.started] == [0, 0]
    listed = ", ".join(
        f"pid {pid} ({name})" for pid, name in sorted([(first, "llama"), (second, "qwen")])
    )
    assert said[0] == f"draining {listed}"
    assert said[-1].endswith(", 0 left") and len(said) == 3


def test_draining_one_of_two(servers: Servers) -> None:
    first, second = servers.start("llama"), servers.start("qwen")
    drain(second, print)
    assert [process.poll() for process in servers.started] == [None, 0]
    with pytest.raises(
        SettingsError, match=rf"--pid {second}: .* running are pid {first} \(llama\)"
    ):
        drain(second, print)


def test_one_that_stays_is_named(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "LEAVE_S", 0.3)
    monkeypatch.setattr(drain_module, "_PROGRESS_S", 0.2)
    pid = servers.start("llama", 0.3, "deaf")
    said: list[str] = []
    with pytest.raises(DeadlineExceeded, match=rf"still there .* pid {pid} .* kill -9 {pid}"):
        drain(None, said.append)
    assert any(line.startswith(f"waiting for pid {pid} (llama), ") for line in said)


def test_one_that_may_not_be_signalled(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process, _signum: int) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", refuse)
    pid = servers.start("llama")
    with pytest.raises(SettingsError, match=f"not permitted to signal pid {pid}, which .+ runs"):
        drain(None, print)


def test_a_state_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with registered("llama", 7.0):
        assert running_servers() == []
    assert "--drain will not find this server" in caplog.text


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--drain"], 1, "--drain: no server of yours runs on this machine"),
        (["--drain", "--pid", "none"], 2, "--pid: should be a valid integer, got 'none'"),
        (["--drain", "--pid", "0"], 2, "--pid: should be greater than 0, got '0'"),
        (["--drain", "--blocks", "0:1"], 2, "--blocks starts a server, --drain ends those that"),
        (["--model=m", "--drain"], 2, "--model starts a server"),
        (["--drain", "--bloks", "0:1"], 2, "unknown flag --bloks"),
        (["--drain=now"], 2, "--drain takes no value: write --drain"),
        (["--pid", "4"], 2, "--pid names the server that --drain is for: write --drain --pid N"),
        (["--model", "m", "--new-swarm", "--pid", "4"], 2, "write --drain --pid N"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(flags)
    except SystemExit as error:
        ended = error.code
    assert ended == code
    told = capsys.readouterr().err
    assert told.startswith("bloombee-server: ") and says in told and told.count("\n") == 1
