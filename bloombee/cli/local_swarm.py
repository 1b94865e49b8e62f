"""A swarm of processes on this machine: what the demo, the benchmarks and tests start.

Every child is a real console script, started as a user would, and is ended by
pid when the block is left, whatever happened inside it; on Linux also when the
thread that started it ends without leaving the block. Single servers can be
killed, frozen and started again, under the identity they had.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bloombee.cli.child import Child, Place, Ready

if TYPE_CHECKING:
    from bloombee.client.loop import LoopThread
    from bloombee.protocol.messages import Description
    from bloombee.transport.direct import DirectDialer
    from bloombee.transport.interface import Endpoint

Report = Callable[[str], None]
_START_S = 300.0
_STOP_S = 6.0
_ASK_S = 3.0


class LocalSwarm:
    """`bloombee-dht` and one `bloombee-server` for each span, on 127.0.0.1.

    A span that is named twice is held twice. `places` says where the DHT node and
    then each server run, when that is not simply here. Use as a context manager.
    Entering raises SwarmError, with the last lines of the child's log, when one does
    not come up; leaving ends all children.
    """

    def __init__(
        self,
        model: str,
        spans: Sequence[str],
        *,
        server_flags: Sequence[str] = (),
        places: Sequence[Place] = (),
        report: Report = lambda _: None,
    ) -> None:
        self.model = model
        self.spans = tuple(spans)
        self.children: list[Child] = []
        self.dht: Ready | None = None
        self.servers: tuple[Ready, ...] = ()
        self._server_flags = tuple(server_flags)
        self._places = tuple(places) or (Place(),) * (len(spans) + 1)
        self._report = report
        self._stack = ExitStack()
        self._questions: _Questions | None = None

    @property
    def initial_peers(self) -> list[str]:
        """Multiaddresses to join the swarm by."""
        return list(self.dht.maddrs) if self.dht else []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bloombee-")))
            stack.callback(self._stop)
            self._start(folder)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # One server --------------------------------------------------------------------

    def index_of(self, peer: str) -> int:
        """Which server a peer is. Raises ValueError when it is none of this swarm."""
        return [server.peer for server in self.servers].index(peer)

    def server(self, index: int) -> Child:
        """The process of one server, to signal it."""
        return self.children[1 + index]

    def kill(self, index: int) -> None:
        """kill -9, and wait until the process is gone."""
        self.server(index).kill()

    def freeze(self, index: int) -> None:
        """SIGSTOP: its connections stay open and nothing answers."""
        self.server(index).signal(signal.SIGSTOP)

    def thaw(self, index: int) -> None:
        """SIGCONT."""
        self.server(index).signal(signal.SIGCONT)

    def restart(self, *indices: int) -> None:
        """Start servers again with the same flags and identity, and wait until all serve.

        They come back at other ports and hold nothing. Raises SwarmError when one
        does not come up.
        """
        for index in indices:
            self.server(index).restart()
        servers = list(self.servers)
        for index in indices:
            servers[index] = self.server(index).wait_ready(_START_S)
        self.servers = tuple(servers)

    def describe(self, *indices: int) -> list[Description]:
        """What servers (all, without indices) say of themselves: free KV tokens, sessions.

        Raises what `bloombee.swarm.describe.ask_endpoint` raises.
        """
        if self._questions is None:
            self._questions = _Questions()
            self._stack.callback(self._questions.close)
        return self._questions.ask([self._endpoint(i) for i in indices or range(len(self.spans))])

    def _endpoint(self, index: int) -> Endpoint:
        from bloombee.transport.certificates import load_or_create
        from bloombee.transport.interface import Endpoint

        ready = self.servers[index]
        certificate = load_or_create(ready.peer, _identity(self.server(index)))
        return Endpoint(ready.peer, ready.endpoint, certificate.hash)

    # All of them -------------------------------------------------------------------

    def _start(self, folder: Path) -> None:
        self._report("starting the DHT")
        place, *places = self._places
        listen = ("--host", place.host, "--dht-port", "0")
        dht = Child("dht", "bloombee.cli.dht", listen, folder, place)
        self.children.append(dht)
        self.dht = dht.wait_ready(_START_S)
        self._report(f"starting {len(self.spans)} servers")
        for index, (span, place) in enumerate(zip(self.spans, places, strict=True)):
            name = f"server-{index}"
            flags = ("--model", self.model, "--blocks", span, "--host", place.host)
            flags += ("--initial-peers", *self.dht.maddrs, *self._server_flags, *place.flags)
            flags += ("--identity", str(folder / f"{name}.key"))
            self.children.append(Child(name, "bloombee.cli.server", flags, folder, place))
        ready = list[Ready]()
        for child in self.children[1:]:
            ready.append(child.wait_ready(_START_S))
            self._report(f"{len(ready)} of {len(self.spans)} servers ready ({ready[-1].span})")
        self.servers = tuple(ready)

    def _stop(self) -> None:
        for child in reversed(self.children):
            child.signal_stop()
        for child in reversed(self.children):
            child.finish(_STOP_S)


class _Questions:
    """Asks servers about themselves, over connections that stay."""

    def __init__(self) -> None:
        # torch and gRPC take seconds to import, and most swarms are never asked.
        from bloombee.client.loop import shared_loop
        from bloombee.swarm.identity import Identity
        from bloombee.transport.direct import DirectDialer

        self._loop: LoopThread = shared_loop()
        self._dialer: DirectDialer = DirectDialer()
        self._identity = Identity.load_or_create(None)

    def ask(self, endpoints: Sequence[Endpoint]) -> list[Description]:
        try:
            return self._loop.run(self._ask(endpoints))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _ask(self, endpoints: Sequence[Endpoint]) -> list[Description]:
        from bloombee.swarm.connection import ConnectionSettings
        from bloombee.swarm.describe import ask_endpoint

        settings = ConnectionSettings(None, _ASK_S)
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(ask_endpoint(each, self._dialer, self._identity, settings))
                for each in endpoints
            ]
        return [task.result() for task in asked]

    def close(self) -> None:
        self._loop.run(self._dialer.close())


def _identity(server: Child) -> Path:
    return server.log.with_suffix(".key")


def equal_spans(blocks: int, servers: int) -> list[str]:
    """`servers` spans as equal as can be over `blocks` blocks, as `START:END`.

    Raises ValueError when there are more servers than blocks, or none.
    """
    if not 1 <= servers <= blocks:
        raise ValueError(f"{blocks} blocks can't be shared among {servers} servers")
    cuts = [blocks * index // servers for index in range(servers + 1)]
    return [f"{start}:{end}" for start, end in zip(cuts, cuts[1:], strict=False)]
