"""Servers and clients of one swarm in one virtual-time loop, and everything that can befall them.

Each server and each client is a process of the loop (see `tests.virtual_time`) and a
peer of a `MemoryNetwork`. Identities come from the seed, so that a run repeats.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bloombee.client.swarm_access import SwarmAccess
from bloombee.client.terms import SessionTerms
from bloombee.config.client import ClientSettings
from bloombee.core import PeerId, Span
from bloombee.server.executor import ExecutorSettings
from bloombee.server.stage import StageParts, StageServer
from bloombee.server.validation import Limits, Offer
from bloombee.swarm.connection import Connection, ConnectionSettings, connect
from bloombee.swarm.identity import Identity
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.swarm.view import SwarmSnapshot
from bloombee.transport.links import LinkShape
from bloombee.transport.memory import MemoryNetwork
from tests.inline_executor import InlineExecutor
from tests.swarm.chaos.digests import VOCABULARY, WIDTH, DigestModel, DigestPool, embed
from tests.virtual_time import VirtualTimeLoop, process

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bloombee.client.history import Entry
    from bloombee.client.session import RemoteSession
    from bloombee.kv.interface import KVPool
    from bloombee.server.executor import Executor
    from bloombee.server.work import Model
    from bloombee.transport.interface import Endpoint
    from tests.swarm.chaos.scripts import Script

FINGERPRINT = "digests"
MAX_STEP_TOKENS = 24
STOP_S = 2.0


def seeded_identity(name: str) -> Identity:
    """An identity that is the same in every run."""
    key = Ed25519PrivateKey.from_private_bytes(random.Random(name).randbytes(32))
    return Identity._from_key(key, None)


def client_settings() -> ClientSettings:
    """Deadlines that make runs short in virtual time, in the proportions of the defaults."""
    return ClientSettings(
        connect_s=3.0,
        open_s=25.0,
        step_s=90.0,
        stage_s=6.0,
        silence_s=3.0,
        recovery_s=40.0,
        queue_s=30.0,
        backoff_cap_s=8.0,
        snapshot_s=0.0,
        prefill_tokens=4,
        steps_in_flight=4,
    )


@dataclass(frozen=True)
class Plan:
    """A swarm to start: the span of each server, and how much KV each has."""

    num_blocks: int
    spans: tuple[Span, ...]
    kv_tokens: int
    delay_s: float = 0.005
    jitter_s: float = 0.002
    stale_s: float = 5.0
    """How long the record of a dead server is still seen."""
    park_idle_s: float = 5.0


@dataclass
class Server:
    """One server through all its lives."""

    name: str
    span: Span
    identity: Identity
    stage: StageServer | None = None
    pool: DigestPool | None = None
    model: DigestModel | None = None
    state: ServerState = ServerState.ONLINE
    died_at: float = float("-inf")
    slowness: float = 1.0
    address: str = ""
    ends: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id


class World:
    """A swarm; `start` it inside a virtual-time loop."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.plan = plan
        self.luck = random.Random(f"world {seed}")
        self.network = MemoryNetwork(
            seed, link=LinkShape(delay_s=plan.delay_s, jitter_s=plan.jitter_s)
        )
        self.servers = [
            Server(f"s{index}", span, seeded_identity(f"server {index}"))
            for index, span in enumerate(plan.spans)
        ]
        self.clients: list[Client] = []

    @property
    def loop(self) -> VirtualTimeLoop:
        running = asyncio.get_running_loop()
        assert isinstance(running, VirtualTimeLoop)
        return running

    def name_of(self, peer: str) -> str:
        """The short name of a server or client."""
        parties = [(s.peer, s.name) for s in self.servers]
        parties += [(c.identity.peer_id, c.name) for c in self.clients]
        return next((name for known, name in parties if known == peer), peer)

    def server_of(self, peer: str) -> Server | None:
        """The server with this peer id."""
        return next((server for server in self.servers if server.peer == peer), None)

    # Servers ---------------------------------------------------------------------

    def vanish(self, client: Client) -> None:
        """kill -9 of a client."""
        if client.talk is not None and not client.talk.done():
            client.vanished_at = self.loop.time()
            self.network.kill(client.identity.peer_id)
            self.loop.thaw(client.name)
            client.talk.cancel()

    async def start(self) -> None:
        """Start all servers."""
        for server in self.servers:
            await self.launch(server)

    async def launch(self, server: Server) -> None:
        """Start a server that does not run, with empty memory."""
        self.network.revive(server.peer)
        server.model = DigestModel(server.span)
        server.pool = DigestPool(server.span, self.plan.kv_tokens)
        server.slowness = 1.0
        # A container comes back elsewhere, a service at its old address.
        address = server.address if self.luck.random() < 0.7 else ""
        listener = self.network.listener(server.peer, address)
        server.address = listener.address
        with process(server.name):
            server.stage = StageServer(
                StageParts(
                    identity=server.identity,
                    listener=listener,
                    dialer=self.network.dialer(server.peer),
                    model=server.model,
                    pool=server.pool,
                    offer=Offer(
                        fingerprint=FINGERPRINT,
                        span=server.span,
                        hidden_size=WIDTH,
                        max_length=4096,
                        vocab_size=VOCABULARY,
                    ),
                    model_name="digests",
                    limits=Limits(
                        max_step_tokens=MAX_STEP_TOKENS, park_idle_s=self.plan.park_idle_s
                    ),
                    executor_settings=ExecutorSettings(pass_tokens=MAX_STEP_TOKENS),
                    connection_settings=ConnectionSettings(now=lambda: 1e9),
                    make_executor=self._executor_maker(server),
                )
            )
            await server.stage.start()
        server.state = ServerState.ONLINE

    def _executor_maker(self, server: Server):  # noqa: ANN202 - the type of StageParts' field
        luck = random.Random(f"{server.name} {self.luck.random()}")

        def compute_s(tokens: int) -> float:
            return server.slowness * (0.002 + 0.0002 * tokens) * luck.uniform(0.5, 1.5)

        def make(model: Model, pool: KVPool, settings: ExecutorSettings) -> Executor:
            return InlineExecutor(model, pool, settings, compute_s)

        return make

    def kill(self, server: Server) -> None:
        """kill -9."""
        stage, server.stage = server.stage, None
        if stage is None:
            return
        server.died_at = self.loop.time()
        self.network.kill(server.peer)
        self.loop.thaw(server.name)
        assert isinstance(stage.executor, InlineExecutor)
        stage.executor.crash()
        for end in server.ends:
            end.cancel()  # it was draining
        with process(server.name):
            server.ends.append(self.loop.create_task(stage.stop(0.0)))

    async def end(self, server: Server, drain_s: float = 0.0) -> None:
        """SIGTERM: sessions get `drain_s` to move."""
        stage = server.stage
        if stage is None or server.state is ServerState.LEAVING:
            return
        server.state = ServerState.LEAVING
        with process(server.name):
            ending = self.loop.create_task(self._end(server, stage, drain_s))
            server.ends.append(ending)
        await asyncio.wait((ending,))

    async def _end(self, server: Server, stage: StageServer, drain_s: float) -> None:
        if drain_s:
            await stage.drain(drain_s)
        await stage.stop(STOP_S)
        if server.stage is stage:
            server.stage = None
            server.died_at = self.loop.time()

    async def restart(self, server: Server) -> None:
        """Start again what has ended."""
        if server.stage is None:
            await self._ended(server)
            if server.stage is None:
                await self.launch(server)

    async def _ended(self, server: Server) -> None:
        """Wait until its former lives are over, without ending them if we are cancelled."""
        while server.ends:
            await asyncio.wait(server.ends[:1])
            if server.ends and server.ends[0].done():
                end = server.ends.pop(0)
                if not end.cancelled():
                    end.result()

    async def heal(self) -> None:
        """Mend all links, thaw all processes, start all servers that don't run."""
        self.network.observer = None
        for source, target in itertools.permutations(self.peers(), 2):
            self.network.shape(source, target, LinkShape(self.plan.delay_s))
        self.network.heal()
        for party in (*self.servers, *self.clients):
            self.loop.thaw(party.name)
        for server in self.servers:
            server.slowness = 1.0
            if server.model is not None:
                server.model.failures.clear()
            if server.state is ServerState.LEAVING:
                await self._ended(server)
            await self.restart(server)

    def peers(self) -> list[str]:
        """All peer ids."""
        return [*(s.peer for s in self.servers), *(c.identity.peer_id for c in self.clients)]

    async def stop(self) -> None:
        """Stop everything that runs."""
        for server in self.servers:
            if server.stage is not None:
                server.ends.append(self.loop.create_task(server.stage.stop(STOP_S)))
        for server in self.servers:
            await self._ended(server)

    # What the DHT would say ----------------------------------------------------------

    async def look(self) -> SwarmSnapshot:
        """Records of servers that run, and for a while of those that died."""
        now = self.loop.time()
        return SwarmSnapshot(
            tuple(
                self._record(server)
                for server in self.servers
                if server.stage is not None or now - server.died_at < self.plan.stale_s
            ),
            (),
            now,
        )

    def _record(self, server: Server) -> ServerRecord:
        return ServerRecord(
            peer=server.peer,
            fingerprint=FINGERPRINT,
            model="digests",
            num_blocks=self.plan.num_blocks,
            span=server.span,
            addresses=(server.address,),
            certificate_hash=b"",
            dtype="float32",
            kv_tokens=self.plan.kv_tokens,
            max_length=4096,
            throughput_tokens_per_s=100.0,
            version="0",
            state=server.state,
        )

    def client(self, settings: ClientSettings | None = None) -> Client:
        """One more client."""
        client = Client(self, f"c{len(self.clients)}", settings or client_settings())
        self.clients.append(client)
        return client


class Client:
    """A client's process."""

    def __init__(self, world: World, name: str, settings: ClientSettings) -> None:
        self.name = name
        self.identity = seeded_identity(f"client {name}")
        self._dialer = world.network.dialer(self.identity.peer_id)
        self._connect_s = settings.connect_s
        self.talk: asyncio.Task[None] | None = None
        self.vanished_at: float | None = None
        self.access = SwarmAccess(
            world.look,
            self._connect,
            settings,
            world.plan.num_blocks,
            self._dialer.close,
            random.Random(name).random,
        )

    async def _connect(self, endpoint: Endpoint) -> Connection:
        settings = ConnectionSettings(None, self._connect_s, lambda: 1e9)
        return await connect(self._dialer, endpoint, self.identity, settings=settings)

    async def open(self, script: Script, tasks: asyncio.TaskGroup) -> RemoteSession:
        """An open session for `script`."""
        wanted = replace(terms(script.rows, script.max_length), prompts=script.prompts)
        return await self.access.open(wanted, tasks, _embed)


def _embed(entries: Sequence[Entry], positions: torch.Tensor) -> torch.Tensor:
    return embed([entry for entry in entries if isinstance(entry, int)], positions.tolist())


def terms(rows: int, max_length: int) -> SessionTerms:
    """What a session of digests reserves."""
    return SessionTerms(FINGERPRINT, rows, max_length, WIDTH, "float32")


def tiled(num_blocks: int, cuts: Sequence[int]) -> list[Span]:
    """Spans that cover all blocks, cut at `cuts`."""
    return [Span(a, b) for a, b in itertools.pairwise((0, *cuts, num_blocks))]
