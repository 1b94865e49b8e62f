"""A server of real parts, from its settings: join, place, load, serve, leave.

1. Join the DHT, so that what the swarm lacks is known. 2. Open the model (config
only) and work out memory. 3. Choose blocks and announce that they are coming.
4. Load them. 5. Listen, measure, and publish the record that makes clients come.
6. Serve until cancelled. 7. Drain: the record says that it is leaving, and clients
move their sessions. 8. Leave: the record goes, then sessions, then the DHT.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from bloombee import __version__
from bloombee.config.settings import ServerSettings
from bloombee.core import PeerId, Span
from bloombee.errors import SettingsError
from bloombee.kv import KVPool, make_pool
from bloombee.models import SpanModel
from bloombee.server.announcement import announced_address, announced_host, announced_name
from bloombee.server.background import in_background
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.leaving import Membership
from bloombee.server.opened import Opened, open_model
from bloombee.server.pacing import Diary, PacedExecutor
from bloombee.server.placement import claim, place
from bloombee.server.stage import StageParts, StageServer
from bloombee.server.validation import Limits, Offer
from bloombee.server.work import Model
from bloombee.swarm.connection import ConnectionSettings
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.transport.certificates import Certificate, load_or_create
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.fallback import FallbackDialer, FallbackListener
from bloombee.transport.interface import TransportLimits
from bloombee.transport.p2p import P2PDialer, P2PListener
from bloombee.transport.shaped import dialer_over, line_of, listener_over

logger = logging.getLogger(__name__)

MAX_STEP_TOKENS = 1 << 16
FRAME_HEAD_BYTES = 1 << 20
MAX_NAME = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server tells whoever started it, once it serves."""

    peer: PeerId
    maddrs: tuple[str, ...]
    endpoint: str
    span: Span
    model: str
    kv_tokens: int

    def __str__(self) -> str:
        return (
            f"serving blocks {self.span} of {self.model}, {self.endpoint}, KV of "
            f"{self.kv_tokens:,} tokens; join with --initial-peers {' '.join(self.maddrs)}"
        )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who this server is, and the key of its swarm if that is private."""

    identity: Identity
    certificate: Certificate
    swarm_key: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The span in memory."""

    model: SpanModel
    pool: KVPool


async def run_server(
    settings: ServerSettings, report: Callable[[Serving], None], *, swarm_key: bytes | None = None
) -> NoReturn:
    """Serve until cancelled, then drain; calls `report` once ready.

    Raises SettingsError and ModelError for what the user can mend, SwarmError when
    the swarm can't be reached or the libp2p daemon ends.
    """
    identity = Identity.load_or_create(settings.identity)
    certificate = load_or_create(identity.peer_id, settings.identity)
    who = Credentials(identity, certificate, swarm_key)
    node = await SwarmNode.start(_node_options(settings), identity)
    async with Membership(node, settings.drain_s) as member:
        opened = await in_background(partial(open_model, settings))
        span = await _choose(settings, opened, member.node)
        fixed = settings.blocks is not None or settings.new_swarm
        record = await claim(_record(opened, span, certificate), member.node, fixed=fixed)
        span = record.span
        opened = opened.settled(settings, span)
        logger.info("blocks %s of %s; %s", span, opened.source.name, opened.memory)
        loaded = await in_background(partial(_load, opened, span))
        stage = member.stage = _stage(settings, opened, loaded, who, member.node.control)
        await stage.start()
        member.online, serving = await _go_online(settings, node, stage, record)
        # Modules and weights are never garbage: collections skip them from here on, which
        # saves pauses of a tenth of a second, and two seconds when the process ends.
        gc.freeze()
        report(serving)
        raise await member.ended(stage)


async def _choose(settings: ServerSettings, opened: Opened, node: SwarmNode) -> Span:
    """The blocks to serve, given what the swarm holds now."""
    num_blocks = opened.source.num_blocks
    snapshot = await node.snapshot(opened.fingerprint, num_blocks)
    return place(settings, opened.memory.blocks, num_blocks, snapshot)


async def _go_online(
    settings: ServerSettings, node: SwarmNode, stage: StageServer, record: ServerRecord
) -> tuple[ServerRecord, Serving]:
    """Measure the span, and publish where it is served; returns what was published."""
    tokens_per_s, kv_tokens = await stage.measure()
    port = int(stage.endpoint.address.rpartition(":")[2])
    host = announced_host(settings.host, settings.initial_peers)
    endpoint = announced_address(settings.announce, host, port)
    online = replace(
        record,
        addresses=(endpoint,),
        state=ServerState.ONLINE,
        throughput_tokens_per_s=tokens_per_s,
        kv_tokens=kv_tokens,
    )
    await node.publish(online)
    return online, Serving(
        peer=record.peer,
        maddrs=tuple(node.maddrs),
        endpoint=endpoint,
        span=record.span,
        model=record.model,
        kv_tokens=kv_tokens,
    )


def _node_options(settings: ServerSettings) -> NodeOptions:
    return NodeOptions(
        initial_peers=settings.initial_peers,
        host=settings.host,
        port=settings.dht_port,
        announce=announced_name(settings.announce),
    )


def _load(opened: Opened, span: Span) -> Loaded:
    model = SpanModel.load_with_ends(opened.source, span, dtype=opened.dtype, device=opened.device)
    shape = opened.source.kv_shape(span, opened.dtype, opened.device)
    pool = make_pool(shape, opened.memory.kv_tokens, max_length=opened.max_length)
    return Loaded(model=model, pool=pool)


def _record(opened: Opened, span: Span, certificate: Certificate) -> ServerRecord:
    """The record of a server that is about to load its blocks."""
    return ServerRecord(
        peer=PeerId(certificate.peer),
        fingerprint=opened.fingerprint,
        model=_public_name(opened.source.name),
        num_blocks=opened.source.num_blocks,
        span=span,
        addresses=(),
        certificate_hash=certificate.hash,
        dtype=str(opened.dtype).removeprefix("torch."),
        kv_tokens=opened.memory.kv_tokens,
        max_length=opened.max_length,
        throughput_tokens_per_s=0.0,
        version=__version__,
        state=ServerState.JOINING,
    )


def _public_name(name: str) -> str:
    """The model's name without the folders of this machine."""
    path = Path(name)
    return (path.resolve().name if path.exists() else name)[-MAX_NAME:]


def _stage(
    settings: ServerSettings, opened: Opened, loaded: Loaded, who: Credentials, libp2p: Path
) -> StageServer:
    """The stage, reached and reaching others by gRPC, and through the daemon at `libp2p`."""
    transport = TransportLimits(max_frame_bytes=settings.max_frame_bytes)
    row_bytes = opened.source.hidden_size * torch.float32.itemsize
    in_frame = (settings.max_frame_bytes - FRAME_HEAD_BYTES) // row_bytes
    if in_frame < 1:
        raise SettingsError(
            f"--max-frame-bytes {settings.max_frame_bytes} holds not one row of the model: "
            f"set at least {FRAME_HEAD_BYTES + row_bytes}"
        )
    line = line_of(settings.emulate_link)
    listener = FallbackListener(
        DirectListener(settings.host, settings.port, who.certificate, transport),
        P2PListener(libp2p, who.identity.peer_id, transport),
    )
    dialer = FallbackDialer(DirectDialer(transport), P2PDialer(libp2p, transport))
    return StageServer(
        StageParts(
            identity=who.identity,
            listener=listener_over(line, listener),
            dialer=dialer_over(line, dialer),
            model=loaded.model,
            pool=loaded.pool,
            offer=Offer(
                fingerprint=opened.fingerprint,
                span=loaded.model.span,
                hidden_size=opened.source.hidden_size,
                max_length=opened.max_length,
                vocab_size=loaded.model.vocab_size,
                blocks=opened.source.num_blocks,
            ),
            model_name=_public_name(opened.source.name),
            codec=settings.codec,
            certificate_hash=who.certificate.hash,
            limits=_limits(settings, opened, in_frame),
            executor_settings=ExecutorSettings(
                threads=torch.get_num_threads() if settings.threads == "auto" else settings.threads,
                pass_tokens=settings.max_step_tokens,
                chunk_tokens=settings.chunk_tokens,
                whole_prompts=opened.source.whole_prompts,
            ),
            connection_settings=ConnectionSettings(swarm_key=who.swarm_key),
            make_executor=_executor(settings, loaded.model.span),
        )
    )


def _limits(settings: ServerSettings, opened: Opened, rows_in_frame: int) -> Limits:
    per_peer = settings.max_tokens_per_peer
    return Limits(
        max_sessions=settings.max_sessions,
        max_sessions_per_peer=settings.max_sessions_per_peer,
        max_tokens_per_peer=None if per_peer == "auto" else per_peer,
        max_wait_s=settings.max_wait_s,
        lease_s=settings.lease_s,
        park_idle_s=settings.park_idle_s,
        park_bytes=opened.memory.park_bytes,
        prefix_bytes=opened.memory.prefix_bytes,
        share_prefixes=settings.share_prefixes,
        max_step_tokens=min(rows_in_frame, MAX_STEP_TOKENS),
        max_messages_per_s=settings.max_requests_per_s,
    )


def _executor(
    settings: ServerSettings, span: Span
) -> Callable[[Model, KVPool, ExecutorSettings], Executor]:
    if settings.pace == 1 and settings.diary is None:
        return Executor
    diary = None
    if settings.diary is not None:
        try:
            diary = Diary(settings.diary / f"{span.start}-{span.end}.jsonl")
        except OSError as error:
            raise SettingsError(
                f"--diary: can't write into {settings.diary}: {error.strerror}; "
                "give a folder that exists and is yours"
            ) from error
    return partial(PacedExecutor, pace=settings.pace, diary=diary)
