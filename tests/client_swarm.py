"""A whole swarm and clients of it in one process: stages over the in-memory transport.

    with ClientSwarm(source, equal_spans(5, 2)) as swarm:
        model = swarm.model()
        model.generate(...)

Stages and clients share the client's own kind of loop thread; tests call the
models from ordinary threads, as users do.
"""

from __future__ import annotations

import itertools
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from bloombee.client.loop import LoopThread
from bloombee.client.model import DistributedModelForCausalLM
from bloombee.client.swarm_access import SwarmAccess
from bloombee.config.client import ClientSettings
from bloombee.core import PeerId, Span
from bloombee.kv import make_pool
from bloombee.models import ModelEnds, ModelSource, SpanModel
from bloombee.server.executor import ExecutorSettings
from bloombee.server.stage import StageParts, StageServer
from bloombee.server.validation import Limits, Offer
from bloombee.swarm.connection import Connection, ConnectionSettings, connect
from bloombee.swarm.identity import Identity
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.swarm.view import SwarmSnapshot
from bloombee.transport.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bloombee.transport.interface import Endpoint

QUICK = ClientSettings(
    connect_s=5,
    open_s=5,
    step_s=60,
    close_s=2,
    prefill_tokens=64,
    snapshot_s=0,
    heartbeat_s=0.1,
    silence_s=1,
    recovery_s=5,
    queue_s=0.3,
    survey_s=0,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much each stage takes."""

    kv_tokens: int = 40_000
    max_step_tokens: int = 512
    pass_tokens: int = 512
    park_idle_s: float = 5.0
    codec: str = "raw"
    prefix_bytes: int = 1 << 24
    share_prefixes: bool = False
    sessions_per_peer: int = 64


@dataclass
class ClientSwarm:
    """Stages of `source`, one for each span, and the clients made for them."""

    source: ModelSource
    spans: Sequence[Span]
    size: Size = field(default_factory=Size)
    dtype: torch.dtype = torch.float32

    def __enter__(self) -> Self:
        self.loop = LoopThread()
        self.network = MemoryNetwork()
        self.stages: list[StageServer] = []
        self.extra_records: list[ServerRecord] = []
        self.lost: set[PeerId] = set()
        self.clients: list[PeerId] = []
        self.speeds: dict[str, float] = {}
        self._models: list[DistributedModelForCausalLM] = []
        self._ends = ModelEnds.load(self.source, dtype=self.dtype, device="cpu")
        with ExitStack() as stack:
            stack.callback(self._stop)
            for span in self.spans:
                self.add(span)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for model in self._models:
            model.close()
        for stage in self.stages:
            self.loop.run(stage.stop(1.0))
        self.loop.close()

    def add(self, span: Span, identity: Identity | None = None) -> StageServer:
        """Start one more stage, or another of the same `identity`."""
        stage = self.build(self.load(span), identity or Identity.load_or_create(None))
        self.loop.run(stage.start())
        self.stages.append(stage)
        return stage

    def load(self, span: Span) -> SpanModel:
        """The weights of a stage."""
        return SpanModel.load_with_ends(
            self.source, span, dtype=self.dtype, device="cpu", progress=False
        )

    def build(self, model: SpanModel, identity: Identity) -> StageServer:
        """A stage that is not started, nor one of `stages`."""
        span = model.span
        return StageServer(
            StageParts(
                identity=identity,
                codec=self.size.codec,
                listener=self.network.listener(identity.peer_id),
                dialer=self.network.dialer(identity.peer_id),
                model=model,
                pool=make_pool(
                    self.source.kv_shape(span, self.dtype, "cpu"),
                    self.size.kv_tokens,
                    max_length=self.source.max_length,
                ),
                offer=Offer(
                    fingerprint=self.source.fingerprint,
                    span=span,
                    hidden_size=self.source.hidden_size,
                    max_length=self.source.max_length,
                    vocab_size=self.source.vocab_size,
                ),
                limits=Limits(
                    max_step_tokens=self.size.max_step_tokens,
                    park_idle_s=self.size.park_idle_s,
                    prefix_bytes=self.size.prefix_bytes,
                    share_prefixes=self.size.share_prefixes,
                    max_sessions_per_peer=self.size.sessions_per_peer,
                ),
                executor_settings=ExecutorSettings(
                    pass_tokens=self.size.pass_tokens, whole_prompts=self.source.whole_prompts
                ),
            )
        )

    # Faults ------------------------------------------------------------------------------

    def now(self, act: Callable[[], object]) -> None:
        """Do something in the loop's thread, where network and stages live."""

        async def call() -> None:
            act()

        self.loop.run(call())

    def at_pass(self, stage: StageServer, number: int, act: Callable[[], object]) -> None:
        """Do something, from the loop's thread, while `stage` computes its pass `number`."""
        model: Any = stage._parts.model
        forward, passes = model.forward, itertools.count()

        def counted(*arguments: Any, **named: Any) -> torch.Tensor:
            if next(passes) == number:
                self.loop._loop.call_soon_threadsafe(act)
            return forward(*arguments, **named)

        model.forward = counted

    def kill(self, stage: StageServer) -> None:
        """End a stage as kill -9 would; call it in the loop's thread."""
        self.network.kill(stage.endpoint.peer)

    def freeze(self, stage: StageServer) -> None:
        """Let nothing reach a stage and nothing leave it; call it in the loop's thread."""
        peer = stage.endpoint.peer
        others = [each.endpoint.peer for each in self.stages if each is not stage]
        self.network.isolate(peer, [*others, *self.clients])

    def restart(self, stage: StageServer, span: Span | None = None) -> StageServer:
        """Start a killed stage again, with nothing in its memory; maybe with another span."""
        self.now(lambda: self.network.revive(stage.endpoint.peer))
        self.stages.remove(stage)
        self.loop.run(stage.stop(1.0))
        return self.add(span or stage.offer.span, stage._parts.identity)  # pyright: ignore[reportArgumentType] - it was made by us

    def serving(self, model: DistributedModelForCausalLM, index: int) -> StageServer:
        """The stage that holds part `index` of a model's newest session."""
        assert model.route is not None
        peer = model.route.stages[index].peer
        return next(each for each in self.stages if each.endpoint.peer == peer)

    def alive(self) -> list[StageServer]:
        """The stages that were not killed."""
        return [each for each in self.stages if each.endpoint.peer not in self.network._dead]

    async def look(self) -> SwarmSnapshot:
        """What a DHT would say."""
        records = [self.record(stage) for stage in self.stages]
        alive = [r for r in [*records, *self.extra_records] if r.peer not in self.lost]
        return SwarmSnapshot(tuple(alive), (), time.time())

    def record(self, stage: StageServer) -> ServerRecord:
        """What a stage announces."""
        return ServerRecord(
            peer=PeerId(stage.endpoint.peer),
            fingerprint=self.source.fingerprint,
            model="tiny",
            num_blocks=self.source.num_blocks,
            span=stage.offer.span,
            addresses=(stage.endpoint.address,),
            certificate_hash=b"",
            dtype=str(self.dtype).removeprefix("torch."),
            kv_tokens=self.size.kv_tokens,
            max_length=stage.offer.max_length,
            throughput_tokens_per_s=self.speeds.get(stage.endpoint.peer, 100.0),
            version="0",
            state=ServerState.ONLINE,
        )

    def model(self, settings: ClientSettings = QUICK) -> DistributedModelForCausalLM:
        """A client of its own identity."""
        identity = Identity.load_or_create(None)
        dialer = self.network.dialer(identity.peer_id)
        self.clients.append(identity.peer_id)

        async def to(endpoint: Endpoint) -> Connection:
            return await connect(
                dialer, endpoint, identity, settings=ConnectionSettings(None, settings.connect_s)
            )

        access = SwarmAccess(
            self.look, to, settings, self.source.num_blocks, dialer.close, random.Random(0).random
        )
        model = DistributedModelForCausalLM(self.source, self._ends, access, self.loop)
        self._models.append(model)
        return model

    def forget(self, model: DistributedModelForCausalLM) -> None:
        """Leave it to the test to close a client."""
        self._models.remove(model)

    def free_tokens(self) -> list[int]:
        """Free KV tokens of every stage."""
        return [self.loop.run(stage.executor.free_tokens()) for stage in self.stages]
