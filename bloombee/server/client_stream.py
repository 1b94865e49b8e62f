"""A client's stream to this stage: it opens a session, and its end is the session's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, ProtocolError, RequestError, TransportError
from bloombee.protocol.failures import to_error, to_message
from bloombee.protocol.messages import (
    Attach,
    Attached,
    Close,
    Closed,
    Failed,
    Hop,
    Open,
    Opened,
    Step,
)
from bloombee.server.executor import Executor
from bloombee.server.sessions import Session, Sessions, check_epoch
from bloombee.server.steps import Steps
from bloombee.server.validation import Limits, Offer, StepContext, check_open
from bloombee.swarm.connection import Connection, ConnectionSettings, Signer, connect
from bloombee.transport.interface import Dialer, Endpoint

logger = logging.getLogger(__name__)

LINK_DEADLINE_S = 15.0
"""For the next stage to accept our Attach; it waits there for the client's own Open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParts:
    """What serving clients takes."""

    offer: Offer
    limits: Limits
    sessions: Sessions
    executor: Executor
    steps: Steps
    identity: Signer
    dialer: Dialer
    connection_settings: ConnectionSettings


class ClientStreams:
    """Opens sessions for clients and serves each until it is closed or its client vanishes."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts

    async def serve(self, client: Connection, opening: Open) -> None:
        """Serve the session that `opening` asks for, from reservation to end.

        A refused Open is answered, and its client may send another. Raises
        TransportError when the client can't be answered.
        """
        try:
            async with self._held(client, opening) as session:
                opened = await self._open(session)
                closed = await self._live(session, opened)
        except BloomBeeError as error:
            logger.info("refused a session of %s: %s", client.remote, error)
            asked = SessionId(opening.session)
            await client.send(to_message(error, session=asked, epoch=opening.epoch))
            return
        if closed:
            await client.send(Closed(session.id))

    @asynccontextmanager
    async def _held(self, client: Connection, opening: Open) -> AsyncIterator[Session]:
        """A session entered in the register; left, freed and unlinked at the end."""
        parts = self._parts
        terms = check_open(opening, parts.offer, parts.limits)
        context = StepContext(terms, parts.offer.hidden_size, parts.limits.max_step_tokens)
        session = Session(opening, client, context)
        parts.sessions.enter(session)
        try:
            yield session
        finally:
            parts.sessions.leave(session)
            freed = parts.executor.free(session.id)
            async with asyncio.TaskGroup() as group:
                for link in (session.downstream, session.upstream):
                    if link is not None:
                        group.create_task(link.close())
                await freed

    async def _open(self, session: Session) -> Opened:
        """Reserve KV and link to the next stage. Raises what stands in the way."""
        terms = session.context.terms
        free_tokens = await self._parts.executor.reserve(
            session.id, terms.sequences, terms.max_length
        )
        self._parts.sessions.stands(session)
        if session.next is not None:
            session.downstream = await self._link(session, session.next)
        return Opened(
            session=session.id,
            epoch=session.epoch,
            held_tokens=session.book.lengths,
            free_tokens=free_tokens,
            max_step_tokens=self._parts.limits.max_step_tokens,
        )

    async def _link(self, session: Session, hop: Hop) -> Connection:
        """A hop stream attached to the session at the next stage.

        Raises TransportError when it can't be reached, else the error it answers.
        """
        endpoint = Endpoint(hop.peer, hop.address, hop.certificate_hash)
        parts = self._parts
        try:
            link = await connect(
                parts.dialer, endpoint, parts.identity, settings=parts.connection_settings
            )
        except TransportError as error:
            raise TransportError(f"can't reach {session.next_name}: {error}") from None
        try:
            await link.send(Attach(session.id, session.secret, session.epoch))
            received = await link.receive(LINK_DEADLINE_S)
            if received is None:
                raise TransportError(f"{session.next_name} closed the stream")
            if isinstance(received[0], Failed):
                raise to_error(received[0])
            if not isinstance(received[0], Attached):
                raise ProtocolError(f"{session.next_name} answered {type(received[0]).__name__}")
        except BaseException:
            await link.close()
            raise
        return link

    async def _live(self, session: Session, opened: Opened) -> bool:
        """Serve steps to the end; True when the client closed the session in due form."""
        closed = False
        try:
            async with asyncio.TaskGroup() as group:
                await session.client.send(opened)
                tasks = (
                    group.create_task(self._parts.steps.send_on(session)),
                    group.create_task(self._watch(session)),
                )
                closed = await self._read(session)
                for task in tasks:
                    task.cancel()
        except* BloomBeeError as ended:
            logger.info("session of %s ended: %s", session.owner, ended.exceptions[0])
        return closed

    async def _read(self, session: Session) -> bool:
        """Take what the client sends; True when it closed the session, False when it left."""
        try:
            while (received := await session.client.receive()) is not None:
                message, payload = received
                if isinstance(message, Close):
                    return True
                if isinstance(message, Step):
                    await self._take(session, message, payload)
                elif isinstance(message, Open):
                    await self._reopen(session, message)
                elif isinstance(message, Failed):
                    logger.debug("client %s: %s", session.owner, message.message)
        except ProtocolError as error:
            await self._parts.steps.fail(session, error)
        return False

    async def _take(self, session: Session, step: Step, payload: memoryview) -> None:
        if session.upstream is not None:
            error = ProtocolError("this stage gets its steps from the stage before it")
            await self._parts.steps.fail(session, error, step.step)
            return
        session.fed_by_client = True
        await self._parts.steps.take(session, step, payload, session.owner)

    async def _reopen(self, session: Session, opening: Open) -> None:
        """Another Open on the stream: an older, the same, or a later epoch; all are refused."""
        try:
            check_epoch(opening.epoch, session.epoch)
            raise RequestError("the session is already open")
        except BloomBeeError as error:
            await self._parts.steps.fail(session, error)

    async def _watch(self, session: Session) -> None:
        """Tell the client at once when the next stage breaks off, or complains."""
        if session.downstream is None:
            return
        try:
            while (received := await session.downstream.receive()) is not None:
                if isinstance(received[0], Failed):
                    await self._parts.steps.fail(session, to_error(received[0]))
        except BloomBeeError as error:
            lost = TransportError(f"lost {session.next_name}: {error}")
            await self._parts.steps.fail(session, lost)
