"""Petals: its own servers and client, in their own environment, started by its own command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from benchmarks.pipelined.client import Answer
from benchmarks.process import LineProcess
from benchmarks.worker import prompts
from bloombee.errors import SwarmError
from bloombee.swarm import tether

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from benchmarks.peers.interface import Site, Workload
    from benchmarks.peers.petals_env import PetalsEnvironment
    from bloombee.cli.child import Place

SIDE = Path(__file__).with_name("petals_side.py")
# Threads that share cores must not spin: it takes nine tenths of the speed.
CALM = ("/usr/bin/env", "OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=0")
TETHERED = (sys.executable, "-I", "-S", str(tether.__file__), "signal")
PREFIX = "compared"
PORT, VOCABULARY = 31330, 49152
START_S, STOP_S, POLL_S = 180.0, 15.0, 0.1
ADDRESS = re.compile(r"Running a server on \['([^']+)'")
STARTED = re.compile(r"\] Started$", re.MULTILINE)


class Job(msgspec.Struct, frozen=True):
    """What the client loads."""

    model: str
    dtype: str
    initial_peers: list[str]
    prefix: str = PREFIX


class Request(msgspec.Struct, frozen=True):
    """Prompts of one length, and how many tokens each gets."""

    ids: list[list[int]]
    new_tokens: int


class Petals:
    """See `System`."""

    def __init__(self, environment: PetalsEnvironment) -> None:
        self.name = "Petals"
        self._environment = environment

    def obstacle(self) -> str:
        """See `System`."""
        return self._environment.obstacle()

    def start(self, site: Site, stack: ExitStack, report: Callable[[str], None]) -> RunningPetals:
        """See `System`. The first server is the swarm that the others join."""
        site.logs.mkdir(parents=True, exist_ok=True)
        python, servers, peers = str(self._environment.python), list[PetalsServer](), list[str]()
        for index, (span, place) in enumerate(zip(site.spans, site.places[1:], strict=True)):
            joined = ("--initial_peers", *peers) if peers else ("--new_swarm",)
            server = PetalsServer(python, site, place, index, (*_flags(site, span, place), *joined))
            stack.callback(server.stop)
            servers.append(server)
            peers = peers or [server.wait_for(ADDRESS)]
        for server in servers:
            server.wait_for(STARTED)
        report(f"Petals: {len(servers)} servers ready")
        job = Job(str(site.model), site.dtype, peers)
        log = str(site.logs / "petals-client.log")
        program = (*CALM, python, "-P", str(SIDE), "client", log)
        client = stack.enter_context(LineProcess("", job, site.places[0].prefix, program))
        return RunningPetals(servers, client)


def _flags(site: Site, span: str, place: Place) -> tuple[str, ...]:
    return (
        *(str(site.model), "--block_indices", span, "--torch_dtype", site.dtype),
        *("--host_maddrs", f"/ip4/{place.host}/tcp/{PORT}", "--dht_prefix", PREFIX),
        # What it would measure first (with a web site), and look for outside.
        *("--device", "cpu", "--throughput", "1", "--no_auto_relay", "--num_handlers", "2"),
        # Room for a batch of 32 prompts at once.
        *("--attn_cache_tokens", "32768", "--max_batch_size", "8192"),
    )


class PetalsServer:
    """One server, its log, and all processes that it started."""

    def __init__(
        self, python: str, site: Site, place: Place, index: int, flags: Sequence[str]
    ) -> None:
        self.log = site.logs / f"petals-{index}.log"
        identity = str(site.logs / f"petals-{index}.key")
        program = (python, "-P", str(SIDE), "serve", *flags, "--identity_path", identity)
        command = [*TETHERED, str(os.getpid()), "-1", *(place.prefix or ()), *CALM, *program]
        with self.log.open("wb") as log:
            # A session of its own, so that what it started can be ended with it.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, line: re.Pattern[str]) -> str:
        """What a line of the log says. Raises SwarmError when it doesn't come."""
        until, never = time.monotonic() + START_S, threading.Event()
        while True:
            text = self.log.read_text(errors="replace")
            if found := line.search(text):
                return found[found.lastindex or 0]
            if self.process.poll() is not None or time.monotonic() > until:
                tail = "\n".join(text.splitlines()[-8:])
                raise SwarmError(f"a Petals server did not come up:\n{tail}")
            never.wait(POLL_S)

    def stop(self) -> None:
        """Ctrl-C, and after a while the end of all that is left of its session."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for each in psutil.process_iter():
            try:
                if os.getsid(each.pid) == self.process.pid:
                    each.kill()
            except (psutil.Error, ProcessLookupError):
                continue  # it ended by itself meanwhile


class RunningPetals:
    """See `Running`."""

    def __init__(self, servers: Sequence[PetalsServer], client: LineProcess) -> None:
        self._servers = servers
        self._client = client

    def run(self, workload: Workload) -> Answer:
        """See `Running`."""
        ids = prompts(workload.batch, workload.prompt, VOCABULARY).tolist()
        self._client.write(Request(ids, workload.new))
        return self._client.read(Answer)

    def processes(self) -> list[psutil.Process]:
        """See `Running`."""
        return [psutil.Process(server.process.pid) for server in self._servers]
