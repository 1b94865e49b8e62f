"""Asking the servers of a swarm what they cost and how their links are, and how far they are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.errors import BloomBeeError, ModelError, ProtocolError, SettingsError, TransportError

if TYPE_CHECKING:
    from bloombee.config.settings import NetworkSettings
    from bloombee.protocol.messages import Describe, Description
    from bloombee.swarm.connection import Connection, ConnectionSettings
    from bloombee.swarm.identity import Identity
    from bloombee.swarm.records import ServerRecord
    from bloombee.swarm.view import SwarmSnapshot
    from bloombee.transport.interface import Dialer

ASK_DEADLINE_S = 5.0
PINGS = 3


@dataclass(frozen=True, slots=True)
class Heard:
    """What a server said, and the quickest of several short questions there and back."""

    record: ServerRecord
    description: Description
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Heards:
    """Answers by span; `silent`: one line for each server that gave none."""

    answers: tuple[Heard, ...]
    silent: tuple[str, ...]


def ask_swarm(settings: NetworkSettings, model: str | None) -> Heards:
    """Ask all serving servers, of one model if it is named.

    Raises SwarmError when no initial peer answers, ModelError when nobody serves the model.
    """
    return asyncio.run(_ask_swarm(settings, model))


async def _ask_swarm(settings: NetworkSettings, model: str | None) -> Heards:
    # hivemind takes seconds to import: not for --help or a wrong flag.
    from bloombee.cli.serving import read_swarm_key
    from bloombee.swarm.connection import ConnectionSettings
    from bloombee.swarm.identity import Identity
    from bloombee.swarm.node import NodeOptions, SwarmNode
    from bloombee.transport.direct import DirectDialer
    from bloombee.transport.fallback import FallbackDialer
    from bloombee.transport.p2p import P2PDialer

    if not settings.initial_peers:
        raise SettingsError("give --initial-peers MADDR ... as the servers print them")
    identity = Identity.load_or_create(None)
    options = NodeOptions(initial_peers=settings.initial_peers, client_mode=True)
    node = await SwarmNode.start(options, identity)
    dialer = FallbackDialer(DirectDialer(), P2PDialer(node.control))
    try:
        records = serving(await node.snapshot(), model)
        connection = ConnectionSettings(read_swarm_key(settings.swarm_key), ASK_DEADLINE_S)
        asker = _Asker(dialer, identity, connection)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asker.try_ask(record)) for record in records]
        found = [task.result() for task in tasks]
    finally:
        await dialer.close()
        await node.close()
    return Heards(
        tuple(each for each in found if isinstance(each, Heard)),
        tuple(
            f"{record.peer}: {each}"
            for record, each in zip(records, found, strict=True)
            if not isinstance(each, Heard)
        ),
    )


def serving(snapshot: SwarmSnapshot, model: str | None) -> list[ServerRecord]:
    """Servers that serve, of the model of that name or fingerprint; by span.

    Raises ModelError when there is none, or when there are models to choose from.
    """
    from bloombee.swarm.view import SERVING

    records = [record for record in snapshot.records if record.state in SERVING]
    if model is not None:
        name = model.lower()
        kept = [r for r in records if name in r.model.lower() or r.fingerprint.startswith(model)]
        records = kept or _by_content(records, model)
    if not records:
        known = ", ".join(sorted({record.model for record in snapshot.records})) or "none"
        raise ModelError(f"no server of this swarm serves {model!r}; it serves: {known}")
    return sorted(records, key=lambda record: (record.span.start, record.span.end, record.peer))


def _by_content(records: list[ServerRecord], model: str) -> list[ServerRecord]:
    """By fingerprint: servers may call the model otherwise than we do."""
    from bloombee.models import open_source

    fingerprint = open_source(model).fingerprint
    return [record for record in records if record.fingerprint == fingerprint]


@dataclass(frozen=True, slots=True)
class _Asker:
    dialer: Dialer
    identity: Identity
    settings: ConnectionSettings

    async def try_ask(self, record: ServerRecord) -> Heard | BloomBeeError:
        try:
            return await self._ask(record)
        except BloomBeeError as error:
            return error

    async def _ask(self, record: ServerRecord) -> Heard:
        """At its first address that answers."""
        from bloombee.protocol.messages import Describe
        from bloombee.swarm.connection import connect
        from bloombee.transport.interface import Endpoint

        failure: BloomBeeError = TransportError("it can't be reached")
        for address in record.addresses or ("",):
            endpoint = Endpoint(record.peer, address, record.certificate_hash)
            try:
                connection = await connect(
                    self.dialer, endpoint, self.identity, settings=self.settings
                )
            except TransportError as error:
                failure = error
                continue
            try:
                said = await self._exchange(connection, Describe(topics=("costs", "links")))
                rtts_s = [await self._ping(connection) for _ in range(PINGS)]
            finally:
                await connection.close()
            return Heard(record, said, min(rtts_s))
        raise failure

    async def _ping(self, connection: Connection) -> float:
        from bloombee.protocol.messages import Describe
        from bloombee.telemetry import Stopwatch

        watch = Stopwatch()
        await self._exchange(connection, Describe())
        return watch.elapsed_s

    async def _exchange(self, connection: Connection, asked: Describe) -> Description:
        from bloombee.protocol import failures
        from bloombee.protocol.messages import Description, Failed

        await connection.send(asked)
        received = await connection.receive(self.settings.deadline_s)
        if received is None:
            raise TransportError("it closed before it answered; try again")
        message = received[0]
        if isinstance(message, Failed):
            raise failures.to_error(message)
        if not isinstance(message, Description):
            raise ProtocolError(f"it answered with {type(message).__name__}")
        return message
