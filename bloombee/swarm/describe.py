"""Asking servers about themselves, what the DHT doesn't carry: free tokens, sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bloombee.errors import BloomBeeError, ProtocolError, TransportError
from bloombee.protocol import failures
from bloombee.protocol.messages import Describe, Description, Failed
from bloombee.swarm.connection import ConnectionSettings, connect
from bloombee.transport.interface import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bloombee.core import PeerId
    from bloombee.swarm.identity import Identity
    from bloombee.swarm.records import ServerRecord
    from bloombee.transport.interface import Dialer

Answer = Description | BloomBeeError
"""What a server said, or why it said nothing."""


NOTHING_MORE = Describe()
"""The short answer."""


async def describe(
    record: ServerRecord,
    dialer: Dialer,
    identity: Identity,
    settings: ConnectionSettings,
    asked: Describe = NOTHING_MORE,
) -> Description:
    """Ask the server of `record`, at its first address that answers.

    Raises what `connect` raises, or the error that the server answers with.
    """
    failure: BloomBeeError = TransportError(f"{record.peer} can't be reached")
    for address in record.addresses or ("",):  # without one, it is reached by its id
        endpoint = Endpoint(record.peer, address, record.certificate_hash)
        try:
            return await ask_endpoint(endpoint, dialer, identity, settings, asked)
        except TransportError as error:
            failure = error
    raise failure


async def describe_all(
    records: Iterable[ServerRecord],
    dialer: Dialer,
    identity: Identity,
    settings: ConnectionSettings,
    asked: Describe = NOTHING_MORE,
) -> dict[PeerId, Answer]:
    """Ask all at once; an error of a server takes the place of its answer."""
    answers: dict[PeerId, Answer] = {}

    async def ask(record: ServerRecord) -> None:
        try:
            answers[record.peer] = await describe(record, dialer, identity, settings, asked)
        except BloomBeeError as error:
            answers[record.peer] = error

    async with asyncio.TaskGroup() as group:
        for record in records:
            group.create_task(ask(record))
    return answers


async def ask_endpoint(
    endpoint: Endpoint,
    dialer: Dialer,
    identity: Identity,
    settings: ConnectionSettings,
    asked: Describe = NOTHING_MORE,
) -> Description:
    """Ask the server that listens there.

    Raises what `connect` raises, TransportError when it closes instead of answering,
    ProtocolError for another answer, or the error that it answers with.
    """
    connection = await connect(dialer, endpoint, identity, settings=settings)
    try:
        await connection.send(asked)
        received = await connection.receive(settings.deadline_s)
    finally:
        await connection.close()
    if received is None:
        raise TransportError(f"{endpoint.address} closed before it answered; try again")
    message = received[0]
    if isinstance(message, Failed):
        raise failures.to_error(message)
    if not isinstance(message, Description):
        raise ProtocolError(f"{endpoint.address} answered with {type(message).__name__}")
    return message
