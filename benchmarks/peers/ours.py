"""Our own servers and client, as a user starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from benchmarks.pipelined.client import Answer, Job, Request
from benchmarks.pipelined.process import ClientProcess
from bloombee.cli.local_swarm import LocalSwarm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from benchmarks.peers.interface import Site, Workload


class Ours:
    """BloomBee with `flags` for its servers beside those that make runs alike.

    Prompts are not kept from one run to the next: Petals has nothing of the kind.
    """

    def __init__(self, name: str, flags: Sequence[str] = ()) -> None:
        self.name = name
        self._flags = tuple(flags)

    def obstacle(self) -> str:
        """Nothing: it is this checkout."""
        return ""

    def start(self, site: Site, stack: ExitStack, report: Callable[[str], None]) -> RunningOurs:
        """See `System`."""
        flags = ("--dtype", site.dtype, "--threads", "1", "--kv-tokens", "32768")
        flags += ("--prefix-bytes", "0", *self._flags)
        swarm = stack.enter_context(
            LocalSwarm(
                str(site.model), site.spans, server_flags=flags, places=site.places, report=report
            )
        )
        job = Job(str(site.model), site.dtype, swarm.initial_peers)
        client = stack.enter_context(ClientProcess(job, site.places[0].prefix))
        return RunningOurs(swarm, client)


class RunningOurs:
    """See `Running`."""

    def __init__(self, swarm: LocalSwarm, client: ClientProcess) -> None:
        self._swarm = swarm
        self._client = client

    def run(self, workload: Workload) -> Answer:
        """See `Running`."""
        request = Request("server", workload.batch, 0, workload.prompt, workload.new)
        return self._client.ask(request)

    def processes(self) -> list[psutil.Process]:
        """See `Running`."""
        return [psutil.Process(server.pid) for server in self._swarm.servers]
