"""A step's way through one stage: taken from a stream, computed, sent on.

Whoever feeds the session (its client, or the stage before) has one task that
reads and calls `take`; one more task per session runs `send_on`. So a step of a
session is read while another computes and a third is being sent.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec
import torch
from jaxtyping import Float

from bloombee.compression import Buffer, torch_dtype
from bloombee.core import PeerId, Phase
from bloombee.errors import BloomBeeError, ProtocolError, RequestError, StepFailed, TransportError
from bloombee.protocol.failures import to_message
from bloombee.protocol.messages import Acknowledged, Output, Step, Timing
from bloombee.server.executor import Executor
from bloombee.server.payloads import Payloads
from bloombee.server.sessions import Finished, Session
from bloombee.server.throttle import Throttle
from bloombee.server.validation import NO_OPERATIONS, check_step, touched
from bloombee.server.work import Outcome, StepWork
from bloombee.swarm.connection import Connection
from bloombee.telemetry import Registry, now_us

logger = logging.getLogger(__name__)

PUSH_DEADLINE_S = 60.0
"""How long the next stage may take to accept a step; 20 Mbit/s need half of it for a full frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What steps pass through."""

    peer: PeerId
    executor: Executor
    payloads: Payloads
    throttle: Throttle
    telemetry: Registry


class Steps:
    """Takes steps into the compute thread and sends on what comes of them."""

    def __init__(self, parts: StepParts) -> None:
        self._peer = parts.peer
        self._executor = parts.executor
        self._payloads = parts.payloads
        self._throttle = parts.throttle
        self._taken = parts.telemetry.counter("steps")
        self._tokens = parts.telemetry.counter("tokens")
        self._repeats = parts.telemetry.counter("repeats")
        self._refused = parts.telemetry.counter("refused_steps")

    @property
    def taken(self) -> int:
        """How many steps were computed, or are about to be."""
        return self._taken.value

    async def take(self, session: Session, step: Step, payload: memoryview, feeder: PeerId) -> None:
        """Check one step of `feeder` and queue it; a bad one is answered with its error.

        Waits while the session has too much in flight or `feeder` sends too fast.
        Raises TransportError when the client can't be told.
        """
        taken_us = now_us()
        if delay_s := self._throttle.delay_s(feeder, taken_us / 1e6):
            await asyncio.sleep(delay_s)
        await session.window.enter(payload.nbytes)
        try:
            queued = await self._queue(session, step, payload, taken_us)
        except BloomBeeError as error:
            session.window.leave(payload.nbytes)
            self._refused.add()
            await self.fail(session, error, step.step)
            return
        if not queued:
            session.window.leave(payload.nbytes)
            self._repeats.add()
            await session.client.send(Acknowledged(session.id, session.epoch, step.step))

    async def fail(self, session: Session, error: BloomBeeError, step: int = 0) -> None:
        """Tell the session's client of an error, of one step or (0) of the session."""
        await session.client.send(
            to_message(error, session=session.id, epoch=session.epoch, step=step)
        )

    async def send_on(self, session: Session) -> None:
        """Send results on as they come, for as long as the session lives.

        Raises TransportError when the client is gone.
        """
        while True:
            finished = await session.outbox.get()
            session.window.leave(finished.payload_bytes)
            if (error := finished.outcome.error) is not None:
                # The stages no longer agree on what the session holds.
                number = finished.step.step
                session.broken = session.broken or (
                    f"step {number} failed ({error}): open a new session"
                )
                await self.fail(session, error, number)
            elif (rows := finished.outcome.rows) is not None:
                await self._send(session, finished, rows)

    async def _queue(
        self, session: Session, step: Step, payload: memoryview, taken_us: int
    ) -> bool:
        """Hand a step to the compute thread; False for a repeat. Raises what is wrong with it."""
        if step.session != session.id:
            raise ProtocolError("the step is of another session than its stream")
        table = check_step(step, session.context)
        if session.broken:
            raise StepFailed(session.broken)
        rows = await self._payloads.decode(step.payload, payload)
        if not session.book.take(step):
            return False
        decode_us = now_us() - taken_us
        put, size = session.outbox.put_nowait, payload.nbytes

        def done(outcome: Outcome) -> None:
            put(Finished(step, outcome, size, taken_us, decode_us))

        self._executor.submit(
            StepWork(
                session=session.id,
                step=step.step,
                phase=Phase(step.phase),
                span=session.context.terms.span,
                table=table,
                touches=touched(step),
                operations=None if step.operations == NO_OPERATIONS else step.operations,
                rows=rows,
                wanted=step.want if session.next is None else "all",
                wire_dtype=torch_dtype(session.wire_dtype),
                done=done,
            )
        )
        self._taken.add()
        self._tokens.add(table.tokens)
        return True

    async def _send(
        self, session: Session, finished: Finished, rows: Float[torch.Tensor, "R D"]
    ) -> None:
        step = finished.step
        started_us = now_us()
        payload, body = await self._payloads.encode(rows, session.wire_dtype)
        timings = step.timings
        if step.trace:
            timings = (*timings, self._timing(finished, started_us))
        if session.downstream is None:
            output = Output(session.id, session.epoch, step.step, payload, timings)
            await session.client.send(output, body)
        else:
            onward = msgspec.structs.replace(step, payload=payload, timings=timings)
            await self._push(session, session.downstream, onward, body)

    async def _push(self, session: Session, hop: Connection, step: Step, body: Buffer) -> None:
        """Send a step to the next stage; when that fails, the client hears of it."""
        try:
            async with asyncio.timeout(PUSH_DEADLINE_S):
                await hop.send(step, body)
        except TimeoutError:
            error = TransportError(f"{session.next_name} took no step for {PUSH_DEADLINE_S:g} s")
            await self.fail(session, error, step.step)
        except TransportError as error:
            lost = TransportError(f"lost {session.next_name}: {error}")
            await self.fail(session, lost, step.step)
        except RequestError as error:  # more than a frame holds
            await self.fail(session, error, step.step)

    def _timing(self, finished: Finished, started_us: int) -> Timing:
        now = now_us()
        return Timing(
            peer=self._peer,
            queue_us=finished.outcome.queue_us,
            compute_us=finished.outcome.compute_us,
            codec_us=float(finished.decode_us + now - started_us),
            total_us=float(now - finished.taken_us),
        )
