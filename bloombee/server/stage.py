"""One stage of the swarm as an object: parts in, streams served.

It takes what it needs, so that tests run many of them over `transport/memory`
in one process; `server.run_server` makes one of real parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from bloombee import __version__
from bloombee.core import PeerId
from bloombee.errors import BloomBeeError, PeerStopping
from bloombee.kv.interface import KVPool
from bloombee.planner.neighbours import AUTO, Neighbours
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import Describe, Description
from bloombee.protocol.report_messages import CostTable, TraceReport
from bloombee.server.admission import Admission
from bloombee.server.client_stream import ClientParts, ClientStreams
from bloombee.server.device import decode_tokens_per_s
from bloombee.server.downstream import Downstream, LinkParts
from bloombee.server.draining import Draining
from bloombee.server.executor import STOPPING, Executor, ExecutorSettings
from bloombee.server.fetching import Fetcher, FetchParts
from bloombee.server.handler import Handler, HandlerParts
from bloombee.server.handover import HandOvers
from bloombee.server.hop_stream import HopStreams
from bloombee.server.live_rows import LiveRows
from bloombee.server.machine import UNKNOWN, Machine
from bloombee.server.openings import OpeningParts, Openings
from bloombee.server.payloads import Payloads
from bloombee.server.prefixes import Prefixes, PrefixParts
from bloombee.server.profile import MakeProfile, Profile
from bloombee.server.scheduler import NOBODY
from bloombee.server.sending import Sending, SendingParts
from bloombee.server.sessions import Session, Sessions
from bloombee.server.steps import StepParts, Steps
from bloombee.server.tasks import BackgroundTasks
from bloombee.server.throttle import Throttle
from bloombee.server.traces import Traces
from bloombee.server.validation import Limits, Offer
from bloombee.server.work import Model
from bloombee.swarm.connection import ConnectionSettings, Signer
from bloombee.telemetry import Registry, Stopwatch, loop_us, now_us
from bloombee.transport.interface import Dialer, Endpoint, Listener

logger = logging.getLogger(__name__)

FAREWELL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a stage is made of. `certificate_hash` is that of the listener's certificate.

    A `pinned` one stays with its blocks whatever the swarm lacks.
    `make_executor` builds what computes: a thread, or in tests something that needs none.
    `make_profile` says what that costs, for the planners of the swarm; None: nobody is told.
    """

    identity: Signer
    listener: Listener
    dialer: Dialer
    model: Model
    pool: KVPool
    offer: Offer
    model_name: str = ""
    codec: str = AUTO
    certificate_hash: bytes = b""
    limits: Limits = field(default_factory=Limits)
    executor_settings: ExecutorSettings = field(default_factory=ExecutorSettings)
    connection_settings: ConnectionSettings = field(default_factory=ConnectionSettings)
    make_executor: Callable[[Model, KVPool, ExecutorSettings], Executor] = Executor
    make_profile: MakeProfile | None = None
    pinned: bool = False
    machine: Machine = UNKNOWN


class StageServer:
    """Serves a span of blocks to clients and to the stages before it."""

    def __init__(self, parts: StageParts) -> None:
        self.telemetry = Registry()
        self.executor = parts.make_executor(parts.model, parts.pool, parts.executor_settings)
        self.sessions = Sessions(parts.limits)
        self._parts = parts
        self._neighbours = Neighbours(parts.codec)
        self._payloads = Payloads(self._neighbours.record)
        self._traces = Traces(parts.limits.traced_sessions)
        self._uptime = Stopwatch()
        self._profile: Profile | None = None
        self._tasks = BackgroundTasks()
        self.admission = Admission(self.executor, parts.pool, parts.limits)
        self.prefixes = Prefixes(
            PrefixParts(
                executor=self.executor,
                shape=parts.pool.shape,
                tasks=self._tasks,
                telemetry=self.telemetry,
                limit_bytes=parts.limits.prefix_bytes,
                shared=parts.limits.share_prefixes,
            )
        )
        self._live_rows = LiveRows(self.executor.set_decode_rows)
        throttle = Throttle(parts.limits.max_messages_per_s)
        self._steps = Steps(
            StepParts(
                peer=parts.identity.peer_id,
                admission=self.admission,
                executor=self.executor,
                live_rows=self._live_rows,
                payloads=self._payloads,
                prefixes=self.prefixes,
                throttle=throttle,
                telemetry=self.telemetry,
                tasks=self._tasks,
            )
        )
        sending = Sending(
            SendingParts(
                peer=parts.identity.peer_id,
                payloads=self._payloads,
                neighbours=self._neighbours,
                telemetry=self.telemetry,
                loop=self._steps.loop,
                traces=self._traces,
            )
        )
        self.openings = self._openings(sending)
        self._handler = Handler(
            HandlerParts(
                identity=parts.identity,
                certificate_hash=parts.certificate_hash,
                connection_settings=parts.connection_settings,
                clients=ClientStreams(
                    ClientParts(
                        openings=self.openings,
                        steps=self._steps,
                        sending=sending,
                        throttle=throttle,
                    )
                ),
                hops=HopStreams(self.sessions, self._steps, sending),
                hand_overs=HandOvers(self.sessions, self.admission, self.executor, self.telemetry),
                throttle=throttle,
                describe=self.describe,
            )
        )

    def _openings(self, sending: Sending) -> Openings:
        parts = self._parts
        downstream = Downstream(
            LinkParts(
                identity=parts.identity,
                dialer=parts.dialer,
                connection_settings=parts.connection_settings,
                neighbours=self._neighbours,
                sending=sending,
                tasks=self._tasks,
            )
        )
        fetcher = Fetcher(
            FetchParts(
                admission=self.admission,
                executor=self.executor,
                identity=parts.identity,
                dialer=parts.dialer,
                connection_settings=parts.connection_settings,
                telemetry=self.telemetry,
            )
        )
        return Openings(
            OpeningParts(
                offer=parts.offer,
                limits=parts.limits,
                sessions=self.sessions,
                admission=self.admission,
                live_rows=self._live_rows,
                sending=sending,
                downstream=downstream,
                tasks=self._tasks,
                fetch=fetcher.fetch,
                adopt=self.prefixes.adopt,
            )
        )

    @property
    def offer(self) -> Offer:
        """What it serves."""
        return self._parts.offer

    @property
    def endpoint(self) -> Endpoint:
        """Where clients and other stages dial it."""
        parts = self._parts
        return Endpoint(parts.identity.peer_id, parts.listener.address, parts.certificate_hash)

    async def start(self) -> None:
        """Start the compute thread and accept streams.

        Raises SettingsError when the address can't be listened on.
        """
        self.executor.start()
        await self._parts.listener.start(self._handler.serve)
        self._tasks.start(self.openings.sweep(), "ending the sessions of lost clients")

    async def failed(self) -> Exception:
        """A bug met in a background task, once there is one: the server is to stop then."""
        return await self._tasks.failed()

    async def drain(self, drain_s: float) -> None:
        """Take no new sessions, and let those that there are move elsewhere.

        Returns when none is left, or after `drain_s`.
        """
        self.openings.refusal = PeerStopping(STOPPING)
        await Draining(self.sessions).run(drain_s)

    def reopen(self) -> None:
        """Take new sessions again, after all."""
        self.openings.refusal = None

    async def stop(self, grace_s: float) -> None:
        """Tell clients, accept and compute no more, and end what still runs after `grace_s`."""
        self._handler.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S), asyncio.TaskGroup() as group:
                for session in self.sessions:
                    group.create_task(_say_farewell(session))
        await self._parts.listener.stop(0.0)
        await self._tasks.stop()
        await self.executor.stop(grace_s)
        await self._parts.dialer.close()
        self._payloads.close()

    async def measure(self) -> tuple[float, int]:
        """Tokens/s of one decoding sequence through the span, and KV tokens of the pool.

        With `make_profile` all costs are measured, or known of earlier; it is for before serving.
        """
        parts = self._parts
        if parts.make_profile is not None:
            self._profile = await parts.make_profile(self.executor, parts.model, parts.pool)
            return self._profile.tokens_per_s(len(parts.offer.span)), parts.pool.total_tokens
        tokens_per_s = await self.executor.call(partial(decode_tokens_per_s, parts.model))
        return tokens_per_s, parts.pool.total_tokens

    async def describe(self, asked: Describe | None = None, asker: PeerId = NOBODY) -> Description:
        """What this stage is doing now, and what the `asker` wanted to know besides.

        Raises PeerStopping once it has stopped.
        """
        parts, asked = self._parts, asked or Describe()
        free_tokens, busy = self.executor.room_and_load()
        return Description(
            peer=parts.identity.peer_id,
            version=__version__,
            model=parts.model_name,
            fingerprint=parts.offer.fingerprint,
            start=parts.offer.span.start,
            end=parts.offer.span.end,
            dtype=str(parts.model.dtype).removeprefix("torch."),
            device=str(parts.model.device),
            kv_tokens=parts.pool.total_tokens,
            free_tokens=free_tokens,
            sessions=len(self.sessions),
            steps=self._steps.taken,
            uptime_s=self._uptime.elapsed_s,
            waiting=self.admission.waiting,
            parked=self.admission.parked,
            prefix_bytes=self.prefixes.store.held_bytes,
            prefix_hits=self.prefixes.hits,
            prefix_tokens_saved=self.prefixes.tokens_saved,
            pinned=parts.pinned,
            busy=busy,
            decode_rows=self._live_rows.rows,
            costs=self._costs() if "costs" in asked.topics else None,
            links=self._neighbours.reports(loop_us()) if "links" in asked.topics else (),
            machine=parts.machine.name,
            cores=parts.machine.cores,
            pace=parts.machine.pace,
            traces=self._told_traces(asked, asker),
        )

    def _told_traces(self, asked: Describe, asker: PeerId) -> tuple[TraceReport, ...]:
        if "traces" not in asked.topics:
            return ()
        return self._traces.reports(asker, asked.session, now_us())

    def _costs(self) -> CostTable | None:
        return None if self._profile is None else self._profile.table()


async def _say_farewell(session: Session) -> None:
    error = PeerStopping(STOPPING)
    if session.client is not None:
        with contextlib.suppress(BloomBeeError):
            await session.client.send(to_message(error, session=session.id, epoch=session.epoch))
