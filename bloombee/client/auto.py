"""`from_pretrained`: from a model's name to a client of the swarm that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

import torch

from bloombee.client.loop import shared_loop
from bloombee.client.model import DistributedModelForCausalLM
from bloombee.client.swarm_access import SwarmAccess
from bloombee.config.client import ClientSettings
from bloombee.errors import SettingsError
from bloombee.models import ModelEnds, ModelSource, open_source, resolve_dtype
from bloombee.swarm.connection import Connection, ConnectionSettings, connect
from bloombee.swarm.identity import Identity
from bloombee.swarm.node import NodeOptions, SwarmNode
from bloombee.transport.direct import DirectDialer
from bloombee.transport.fallback import FallbackDialer
from bloombee.transport.interface import Endpoint
from bloombee.transport.p2p import P2PDialer
from bloombee.transport.shaped import dialer_over, line_of


class AutoDistributedModelForCausalLM:
    """Loads the client's share of a model and joins the swarm that serves the rest."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        raise SettingsError("use AutoDistributedModelForCausalLM.from_pretrained(model, ...)")

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - mirrors transformers' from_pretrained
        cls,
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str = (),
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        swarm_key: bytes | None = None,
        revision: str | None = None,
        cache_dir: Path | None = None,
        settings: ClientSettings | None = None,
        identity: str | Path | None = None,
    ) -> DistributedModelForCausalLM:
        """A client of the swarm that `initial_peers` (multiaddresses) belong to.

        `model` is a path, a hub id or an alias, as for the servers; only embeddings,
        final norm and head are loaded. `dtype` must be the one that servers compute in.
        `identity` is a file with this client's key, made if missing: with it servers know a
        client again that has started anew, and the prompts they kept for it. Each of two clients
        at a time needs its own; without a file each is a new one.
        Raises ModelError, SettingsError, or SwarmError when no initial peer answers.
        """
        peers = (initial_peers,) if isinstance(initial_peers, str) else tuple(initial_peers)
        if not peers:
            raise SettingsError("give initial_peers=[...], as the servers print them")
        source = open_source(str(model), revision=revision, cache_dir=cache_dir)
        name = str(dtype).removeprefix("torch.")
        share = LocalShare.load(source, resolve_dtype(name, source, device), device)
        return share.join(peers, swarm_key=swarm_key, settings=settings, identity=identity)


@dataclass(frozen=True, slots=True)
class LocalShare:
    """The client's part of a model, loaded, not yet in a swarm."""

    source: ModelSource
    ends: ModelEnds

    @classmethod
    def load(cls, source: ModelSource, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load embeddings, final norm and head. Raises ModelError."""
        return cls(source, ModelEnds.load(source, dtype=dtype, device=device))

    def join(
        self,
        initial_peers: tuple[str, ...],
        *,
        swarm_key: bytes | None = None,
        settings: ClientSettings | None = None,
        identity: str | Path | None = None,
    ) -> DistributedModelForCausalLM:
        """A client of the swarm of `initial_peers`. Raises SettingsError or SwarmError."""
        loop = shared_loop()
        known = Identity.load_or_create(None if identity is None else Path(identity))
        joining = _join(self.source, initial_peers, known, swarm_key, settings or ClientSettings())
        return DistributedModelForCausalLM(self.source, self.ends, loop.run(joining), loop)


async def _join(
    source: ModelSource,
    initial_peers: tuple[str, ...],
    identity: Identity,
    swarm_key: bytes | None,
    settings: ClientSettings,
) -> SwarmAccess:
    """Join the DHT as a client. Raises SettingsError or SwarmError."""
    node = await SwarmNode.start(NodeOptions(initial_peers, client_mode=True), identity)
    line = line_of(settings.emulate_link)
    dialer = dialer_over(line, FallbackDialer(DirectDialer(), P2PDialer(node.control)))
    connecting = ConnectionSettings(swarm_key, settings.connect_s)

    async def to(endpoint: Endpoint) -> Connection:
        return await connect(dialer, endpoint, identity, settings=connecting)

    async def leave() -> None:
        await dialer.close()
        await node.close()

    look = partial(node.snapshot, source.fingerprint, source.num_blocks)
    return SwarmAccess(look, to, settings, source.num_blocks, leave)
