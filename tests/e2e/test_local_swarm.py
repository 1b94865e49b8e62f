"""A swarm of processes ends with the process that started it, however that ends."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.e2e.dht_processes import ROOT, wait_until

STARTER = """
import sys
from bloombee.cli.local_swarm import LocalSwarm
with LocalSwarm("smollm2", []) as swarm:
    print(swarm.dht.pid, flush=True)
    sys.stdin.read()
"""


def test_children_of_a_killed_parent_are_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        dht = psutil.Process(int(starter.stdout.readline()))
        family = [dht, *dht.children(recursive=True)]
        assert "p2pd" in [process.name() for process in family]
        starter.kill()
        wait_until(lambda: not any(alive(process) for process in family), 3.0)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
