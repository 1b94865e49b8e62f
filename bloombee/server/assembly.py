"""What a server makes its stages of: the opened model, its settings, and who it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bloombee import __version__
from bloombee.config.settings import ServerSettings
from bloombee.core import PeerId, Span
from bloombee.errors import SettingsError
from bloombee.kv import KVPool, make_pool
from bloombee.models import SpanModel
from bloombee.server.announcement import announced_address, announced_host
from bloombee.server.background import in_background
from bloombee.server.device import free_bytes
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.machine import this_machine
from bloombee.server.opened import Opened
from bloombee.server.pacing import Diary, PacedExecutor
from bloombee.server.profile import profiling
from bloombee.server.stage import StageParts, StageServer
from bloombee.server.validation import Limits, Offer
from bloombee.server.work import Model
from bloombee.swarm.connection import ConnectionSettings
from bloombee.swarm.identity import Identity
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.transport.certificates import Certificate
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.fallback import FallbackDialer, FallbackListener
from bloombee.transport.interface import TransportLimits
from bloombee.transport.p2p import P2PDialer, P2PListener
from bloombee.transport.shaped import dialer_over, line_of, listener_over

MAX_STEP_TOKENS = 1 << 16
FRAME_HEAD_BYTES = 1 << 20
MAX_NAME = 96


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who this server is, and the key of its swarm if that is private."""

    identity: Identity
    certificate: Certificate
    swarm_key: bytes | None


class Assembly:
    """Makes the stages of one server, one after another, at the same port.

    They are reached and reach others by gRPC, and through the daemon at `libp2p`.
    """

    def __init__(
        self, settings: ServerSettings, opened: Opened, who: Credentials, libp2p: Path
    ) -> None:
        self._settings = settings
        self._opened = opened
        self._who = who
        self._libp2p = libp2p
        self._port = settings.port

    def record(self, span: Span) -> ServerRecord:
        """The record of a server that is about to load `span`."""
        opened, settings = self._opened, self._settings
        return ServerRecord(
            peer=PeerId(self._who.certificate.peer),
            fingerprint=opened.fingerprint,
            model=_public_name(opened.source.name),
            num_blocks=opened.source.num_blocks,
            span=span,
            addresses=(),
            certificate_hash=self._who.certificate.hash,
            dtype=str(opened.dtype).removeprefix("torch."),
            kv_tokens=opened.memory.kv_tokens,
            max_length=opened.max_length,
            throughput_tokens_per_s=0.0,
            version=__version__,
            state=ServerState.JOINING,
            pinned=settings.pin or settings.blocks is not None,
        )

    def settled(self, span: Span) -> Opened:
        """The model with the plan of memory for `span`."""
        return self._opened.settled(self._settings, span)

    def fits_beside(self, span: Span) -> bool:
        """Whether the weights of `span` fit beside those that are loaded, and their KV."""
        opened = self.settled(span)
        free = replace(opened.room, free_bytes=free_bytes(opened.device))
        kv_bytes = opened.memory.kv_bytes if free.is_shared else 0  # elsewhere it is taken
        return free.bytes_of(len(span), 0) + kv_bytes <= free.usable_bytes

    async def load(self, span: Span) -> SpanModel:
        """Load the weights of `span`; raises ModelError, or what torch and files do."""
        opened = self._opened
        load = partial(SpanModel.load_with_ends, dtype=opened.dtype, device=opened.device)
        return await in_background(lambda: load(opened.source, span))

    def stage(self, model: SpanModel) -> StageServer:
        """A stage of `model`, with KV of its own; it is not started."""
        settings, who, opened = self._settings, self._who, self.settled(model.span)
        transport = TransportLimits(max_frame_bytes=settings.max_frame_bytes)
        line = line_of(settings.emulate_link)
        listener = FallbackListener(
            DirectListener(settings.host, self._port, who.certificate, transport),
            P2PListener(self._libp2p, who.identity.peer_id, transport),
        )
        dialer = FallbackDialer(DirectDialer(transport), P2PDialer(self._libp2p, transport))
        return StageServer(
            StageParts(
                identity=who.identity,
                listener=listener_over(line, listener),
                dialer=dialer_over(line, dialer),
                model=model,
                pool=_pool(opened, model.span),
                offer=Offer(
                    fingerprint=opened.fingerprint,
                    span=model.span,
                    hidden_size=opened.source.hidden_size,
                    max_length=opened.max_length,
                    vocab_size=model.vocab_size,
                    blocks=opened.source.num_blocks,
                ),
                model_name=_public_name(opened.source.name),
                codec=settings.codec,
                certificate_hash=who.certificate.hash,
                limits=_limits(settings, opened),
                executor_settings=_computing(settings, opened),
                connection_settings=ConnectionSettings(swarm_key=who.swarm_key),
                make_executor=_executor(settings, model.span),
                make_profile=profiling(settings, opened, _computing(settings, opened).threads),
                pinned=settings.pin or settings.blocks is not None,
                machine=this_machine(uses_cores=opened.device.type == "cpu", pace=settings.pace),
            )
        )

    def address(self, stage: StageServer) -> str:
        """Where others reach a stage that has started; the next one listens there as well."""
        settings = self._settings
        self._port = int(stage.endpoint.address.rpartition(":")[2])
        host = announced_host(settings.host, settings.initial_peers)
        return announced_address(settings.announce, host, self._port)


def _pool(opened: Opened, span: Span) -> KVPool:
    shape = opened.source.kv_shape(span, opened.dtype, opened.device)
    return make_pool(shape, opened.memory.kv_tokens, max_length=opened.max_length)


def _public_name(name: str) -> str:
    """The model's name without the folders of this machine."""
    path = Path(name)
    return (path.resolve().name if path.exists() else name)[-MAX_NAME:]


def _computing(settings: ServerSettings, opened: Opened) -> ExecutorSettings:
    return ExecutorSettings(
        threads=torch.get_num_threads() if settings.threads == "auto" else settings.threads,
        pass_tokens=settings.max_step_tokens,
        chunk_tokens=settings.chunk_tokens,
        whole_prompts=opened.source.whole_prompts,
    )


def _rows_in_frame(settings: ServerSettings, hidden_size: int) -> int:
    row_bytes = hidden_size * torch.float32.itemsize
    rows = (settings.max_frame_bytes - FRAME_HEAD_BYTES) // row_bytes
    if rows < 1:
        raise SettingsError(
            f"--max-frame-bytes {settings.max_frame_bytes} holds not one row of the model: "
            f"set at least {FRAME_HEAD_BYTES + row_bytes}"
        )
    return rows


def _limits(settings: ServerSettings, opened: Opened) -> Limits:
    per_peer = settings.max_tokens_per_peer
    rows_in_frame = _rows_in_frame(settings, opened.source.hidden_size)
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
    diary = needs = None
    if settings.diary is not None:
        file = settings.diary / f"{span.start}-{span.end}.jsonl"
        needs = file.with_suffix(".needs.json")
        try:
            diary = Diary(file)
        except OSError as error:
            raise SettingsError(
                f"--diary: can't write into {settings.diary}: {error.strerror}; "
                "give a folder that exists and is yours"
            ) from error
    return partial(PacedExecutor, pace=settings.pace, diary=diary, needs=needs)
