"""Many stages in one process over the in-memory transport, and a client that speaks raw protocol.

    async with swarm([stage_of(source, Span(0, 3)), stage_of(source, Span(3, 5))]) as s:
        session = await s.client().open(s.route(), sequences=2, max_length=64)
        rows = await session.step(rows, {0: (0, 7), 1: (0, 5)}, want="all")
        await session.close()

`counting_stage` gives stages without a model, whose pool only counts tokens.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from bloombee import compression
from bloombee.core import SessionId, Span
from bloombee.errors import HopLost, TransportError
from bloombee.kv import make_pool
from bloombee.models import SpanModel
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import (
    AnyMessage,
    Close,
    Closed,
    Failed,
    Hop,
    Message,
    Open,
    Opened,
    Output,
    Payload,
    Step,
)
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.stage import StageParts, StageServer
from bloombee.server.validation import Limits, Offer
from bloombee.swarm.connection import Connection, ConnectionSettings, connect
from bloombee.swarm.identity import Identity
from bloombee.transport.memory import MemoryDialer, MemoryNetwork
from tests.counting_pool import SPAN, VOCABULARY, WIDTH, AddingModel, CountingPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from bloombee.kv.interface import KVPool
    from bloombee.models import ModelSource
    from bloombee.server.work import Model

M = TypeVar("M", bound=Message)

FINGERPRINT = "tiny"
PATIENCE_S = 20.0
"""How long a test waits for an answer before it fails."""


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """A stage to start: its model and pool, and what it offers."""

    model: Model
    pool: KVPool
    offer: Offer
    limits: Limits = field(default_factory=Limits)
    pass_tokens: int = 512
    make_executor: Callable[[Model, KVPool, ExecutorSettings], Executor] = Executor


def counting_stage(kv_tokens: int = 1000, **changes: Any) -> StageSetup:
    """A stage that adds one for each block of 0:4 and keeps lengths only."""
    offer = Offer(
        fingerprint=FINGERPRINT,
        span=SPAN,
        hidden_size=WIDTH,
        max_length=500,
        vocab_size=VOCABULARY,
    )
    return StageSetup(model=AddingModel(), pool=CountingPool(kv_tokens), offer=offer, **changes)


def stage_of(
    source: ModelSource,
    span: Span,
    *,
    dtype: torch.dtype = torch.float32,
    kv_tokens: int = 4096,
    **changes: Any,
) -> StageSetup:
    """A stage that serves `span` of a real (tiny) model."""
    offer = Offer(
        fingerprint=source.fingerprint,
        span=span,
        hidden_size=source.hidden_size,
        max_length=source.max_length,
        vocab_size=source.vocab_size,
    )
    model = SpanModel.load_with_ends(source, span, dtype=dtype, device="cpu", progress=False)
    shape = source.kv_shape(span, dtype, "cpu")
    pool = make_pool(shape, kv_tokens, max_length=source.max_length)
    return StageSetup(model=model, pool=pool, offer=offer, **changes)


def counting_rows(count: int) -> torch.Tensor:
    """Rows whose values count up from 0, as wide as a counting stage wants them."""
    return torch.arange(float(count))[:, None].expand(-1, WIDTH).contiguous()


def run(*stages: StageSetup, test: Callable[[Swarm], Awaitable[None]]) -> None:
    """Run `test` against these stages, and fail it after a minute."""

    async def main() -> None:
        async with swarm(stages) as s:
            await test(s)

    asyncio.run(asyncio.wait_for(main(), 60))


TWO = (Span(0, 2), Span(2, 4))
"""A route over two counting stages."""


class Swarm:
    """Running stages, in order, and the network between them."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.stages: list[StageServer] = []

    async def start(self, setup: StageSetup) -> StageServer:
        """Start one more stage."""
        identity = Identity.load_or_create(None)
        stage = StageServer(
            StageParts(
                identity=identity,
                listener=self.network.listener(identity.peer_id),
                dialer=self.network.dialer(identity.peer_id),
                model=setup.model,
                pool=setup.pool,
                offer=setup.offer,
                model_name="tiny",
                limits=setup.limits,
                executor_settings=ExecutorSettings(pass_tokens=setup.pass_tokens),
                make_executor=setup.make_executor,
            )
        )
        await stage.start()
        self.stages.append(stage)
        return stage

    def route(self, *spans: Span) -> list[RouteStage]:
        """All stages in order, each with its own span or the one given for it."""
        chosen = spans or tuple(stage.offer.span for stage in self.stages)
        return [RouteStage(stage, span) for stage, span in zip(self.stages, chosen, strict=True)]

    def client(self) -> RawClient:
        """A client with an identity of its own."""
        identity = Identity.load_or_create(None)
        return RawClient(identity, self.network.dialer(identity.peer_id))

    async def free_tokens(self) -> list[int]:
        """Free KV tokens of every stage, as of all that reached it before."""
        return [await stage.executor.free_tokens() for stage in self.stages]


@asynccontextmanager
async def swarm(
    setups: Sequence[StageSetup], network: MemoryNetwork | None = None
) -> AsyncIterator[Swarm]:
    """Start `setups` as stages; stop all of them at the end."""
    running = Swarm(network or MemoryNetwork())
    try:
        for setup in setups:
            await running.start(setup)
        yield running
    finally:
        for stage in running.stages:
            await stage.stop(2.0)


@dataclass(frozen=True)
class RouteStage:
    """One stage of a route."""

    server: StageServer
    span: Span

    @property
    def hop(self) -> Hop:
        """What the stage before it is told."""
        endpoint = self.server.endpoint
        return Hop(endpoint.peer, endpoint.address, endpoint.certificate_hash)


class RawClient:
    """Speaks the protocol by hand, so that it can also speak it wrongly."""

    def __init__(self, identity: Identity, dialer: MemoryDialer) -> None:
        self.identity = identity
        self.dialer = dialer

    async def connect(self, stage: StageServer) -> Connection:
        """A greeted stream to a stage."""
        return await connect(
            self.dialer, stage.endpoint, self.identity, settings=ConnectionSettings()
        )

    async def open(
        self,
        route: Sequence[RouteStage],
        *,
        sequences: int = 1,
        max_length: int = 64,
        **changes: Any,
    ) -> RawSession:
        """Open a session on every stage; `changes` go into every Open.

        Raises the first error that a stage answers with.
        """
        session, secret = SessionId(secrets.token_bytes(16)), secrets.token_bytes(16)
        hops: list[Hop | None] = [stage.hop for stage in route[1:]]
        links = [await self.connect(stage.server) for stage in route]
        for link, stage, hop in zip(links, route, [*hops, None], strict=True):
            opening = Open(
                session=session,
                secret=secret,
                epoch=0,
                fingerprint=stage.server.offer.fingerprint,
                start=stage.span.start,
                end=stage.span.end,
                sequences=sequences,
                max_length=max_length,
                dtype="float32",
                next=hop,
            )
            await link.send(msgspec.structs.replace(opening, **changes))
        opened = [await expect(link, Opened) for link in links]
        return RawSession(session, secret, links, opened, changes.get("epoch", 0))


class RawSession:
    """One session on every stage of a route; `links` are the client's streams in order."""

    def __init__(
        self,
        session: SessionId,
        secret: bytes,
        links: list[Connection],
        opened: list[Opened],
        epoch: int = 0,
    ) -> None:
        self.id = session
        self.secret = secret
        self.links = links
        self.opened = opened
        self.epoch = epoch
        self.steps = 0

    def message(
        self, rows: torch.Tensor, table: Mapping[int, tuple[int, int]], **changes: Any
    ) -> Step:
        """The next step over `table`: sequence -> (first position, count)."""
        self.steps += 1
        step = Step(
            session=self.id,
            epoch=self.epoch,
            step=self.steps,
            phase="prefill",
            sequences=tuple(table),
            first_positions=tuple(first for first, _ in table.values()),
            counts=tuple(count for _, count in table.values()),
            payload=Payload("rows", "float32", rows.shape[0], rows.shape[1]),
        )
        return msgspec.structs.replace(step, **changes)

    async def send(self, step: Step, rows: torch.Tensor, stage: int = 0) -> None:
        """Send one step to the first (or another) stage."""
        await self.links[stage].send(step, compression.encode(rows)[1])

    async def step(
        self, rows: torch.Tensor, table: Mapping[int, tuple[int, int]], **changes: Any
    ) -> torch.Tensor:
        """Send a step and wait for its output; raises the error of a Failed."""
        await self.send(self.message(rows, table, **changes), rows)
        return await self.output()

    async def output(self) -> torch.Tensor:
        """The rows of the next Output of the last stage."""
        return (await self.answer())[1]

    async def answer(self) -> tuple[Output, torch.Tensor]:
        """The next Output of any stage, and its rows; raises the error of a Failed."""
        output, body = await self._first_word()
        if isinstance(output, Failed):
            raise to_error(output)
        assert isinstance(output, Output), output
        payload = output.payload
        rows = compression.decode(body, payload.codec, payload.dtype, payload.rows, payload.width)
        return output, rows

    async def _first_word(self) -> tuple[AnyMessage, memoryview]:
        """What the first stage that says anything says; a Failed before an Output."""
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(_receive(link)) for link in self.links]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        said = [task.result() for task in waiting if not task.cancelled()]
        return next((word for word in said if isinstance(word[0], Failed)), said[-1])

    async def close(self) -> None:
        """Close the session on every stage."""
        for link in self.links:
            await link.send(Close(self.id))
        for link in self.links:
            await closed(link)
            await link.close()

    async def vanish(self) -> None:
        """End all streams without a word."""
        for link in self.links:
            await link.close()


async def closed(link: Connection) -> None:
    """The stage's word that it closed the session; one whose next stage was faster may say so."""
    while not isinstance(message := (await _receive(link))[0], Closed):
        assert isinstance(message, Failed) and message.code == HopLost.code, message


async def expect(link: Connection, kind: type[M]) -> M:
    """The next message, which must be of `kind`; raises the error of a Failed."""
    message, _ = await _receive(link)
    if isinstance(message, kind):
        return message
    if isinstance(message, Failed):
        raise to_error(message)
    raise AssertionError(f"{message} instead of {kind.__name__}")


async def kv_freed(swarm: Swarm, *expected: int) -> None:
    """Wait until the stages have so many free tokens."""

    async def freed() -> bool:
        return await swarm.free_tokens() == list(expected)

    await eventually(freed, f"{expected} tokens are free")


async def eventually(condition: Any, what: str) -> None:
    """Wait until the coroutine function `condition` returns true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
    assert await condition(), what


async def _receive(link: Connection) -> tuple[AnyMessage, memoryview]:
    received = await link.receive(PATIENCE_S)
    if received is None:
        raise TransportError(f"{link.remote} closed the stream")
    return received
