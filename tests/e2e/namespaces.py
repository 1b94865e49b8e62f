"""Hosts with addresses of their own on this machine, whose links can be cut.

Every host is a network namespace joined to a bridge in one more namespace; this
process sits on the bridge too. A namespace lives as long as the process that holds
it, and those die with us however we end: nothing is left to clean up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from typing import Self

import pytest

from bloombee.cli.child import Place
from bloombee.swarm import tether
from tests.e2e.dht_processes import wait_until

TOOLS = ("ip", "nsenter", "unshare", "sleep")
NOWHERE = "02:00:00:00:00:01"
"""A link-layer address that nobody has."""


def need_namespaces() -> None:
    """Skip the tests of this module where namespaces can't be made, and say why."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"cutting links needs {', '.join(missing)} (iproute2, util-linux)")
    made = subprocess.run([tool("unshare"), "-n", "true"], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"cutting links needs root, to make namespaces: {made.stderr.strip()}")


def tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, name
    return path


class Network:
    """Hosts by name; as a context manager. `here` is the address of this process."""

    def __init__(self, *names: str) -> None:
        self._subnet = f"10.213.{os.getpid() % 254}"
        self._addresses = {name: f"{self._subnet}.{i}" for i, name in enumerate(names, start=2)}
        self._holders: dict[str, int] = {}
        self._hub = 0
        self._stack = ExitStack()
        self.here = f"{self._subnet}.1"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._hub = self._hold(stack)
            self._in(self._hub, "link", "add", "bridge", "type", "bridge")
            self._in(self._hub, "link", "set", "bridge", "up")
            self._join_here()
            for number, name in enumerate(self._addresses):
                self._holders[name] = self._hold(stack)
                self._join(name, f"port{number}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def place(self, name: str) -> Place:
        """Where a child of this host runs."""
        prefix = (tool("nsenter"), "-t", str(self._holders[name]), "-n", "--")
        return Place(self._addresses[name], prefix)

    def cut(self, name: str) -> None:
        """No packet goes to or from the host any more; its own link stays up."""
        self._in(self._hub, "link", "set", self._port(name), "nomaster")

    def mend(self, name: str) -> None:
        self._in(self._hub, "link", "set", self._port(name), "master", "bridge")

    def cut_here(self) -> None:
        """The same for this process."""
        self._in(self._hub, "link", "set", "here", "nomaster")

    def mend_here(self) -> None:
        self._in(self._hub, "link", "set", "here", "master", "bridge")

    def mute(self, speaker: str, listener: str) -> None:
        """What one host sends to the other is lost; the other direction works."""
        arguments = ("lladdr", NOWHERE, "nud", "permanent", "dev", "wire")
        self._in(self._holders[speaker], "neigh", "replace", self._addresses[listener], *arguments)

    def unmute(self, speaker: str, listener: str) -> None:
        self._in(self._holders[speaker], "neigh", "del", self._addresses[listener], "dev", "wire")

    # Making it -----------------------------------------------------------------------

    def _port(self, name: str) -> str:
        return f"port{list(self._addresses).index(name)}"

    def _hold(self, stack: ExitStack) -> int:
        """A process in a new namespace; ends with the stack, or with us."""
        tied = (sys.executable, "-I", "-S", str(tether.__file__), "signal", str(os.getpid()), "-1")
        process = subprocess.Popen([*tied, tool("unshare"), "-n", tool("sleep"), "infinity"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        ours = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{process.pid}/ns/net") != ours, 10.0)
        self._in(process.pid, "link", "set", "lo", "up")
        return process.pid

    def _join(self, name: str, port: str) -> None:
        holder = self._holders[name]
        pair = ("type", "veth", "peer", "name", "wire", "netns", str(holder))
        self._in(self._hub, "link", "add", port, *pair)
        self._in(holder, "addr", "add", f"{self._addresses[name]}/24", "dev", "wire")
        self._in(holder, "link", "set", "wire", "up")
        self._plug(port)

    def _join_here(self) -> None:
        device = f"bee{os.getpid()}"  # goes with its other end, that is, with the hub
        pair = ("type", "veth", "peer", "name", "here", "netns", str(self._hub))
        run("ip", "link", "add", device, *pair)
        run("ip", "addr", "add", f"{self.here}/24", "dev", device)
        run("ip", "link", "set", device, "up")
        self._plug("here")

    def _plug(self, port: str) -> None:
        self._in(self._hub, "link", "set", port, "master", "bridge", "up")

    @staticmethod
    def _in(holder: int, *words: str) -> None:
        run("nsenter", "-t", str(holder), "-n", "--", "ip", *words)


def run(name: str, *words: str) -> None:
    done = subprocess.run([tool(name), *words], capture_output=True, text=True)
    assert done.returncode == 0, f"{name} {' '.join(words)}: {done.stderr}"
