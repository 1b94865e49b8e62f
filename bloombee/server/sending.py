"""What comes of steps, on its way out: to the next stage, to the client, or round the loop.

One task per session and epoch takes it from the outbox, in order. Results for the
next stage wait there until the link stands. Tokens go round the loop at once, and to the
client by a task of their own: one that is slow holds the loop only when it is far behind.
A timer a message would cost as much as
all the rest: that sending takes too long those notice who look at times anyway, the
watch over the link and the sweep over leases, and they end the stream.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from jaxtyping import Float

from bloombee.compression import LOSSY, Buffer
from bloombee.core import PeerId
from bloombee.errors import BloomBeeError, DeadlineExceeded, HopLost, RequestError, TransportError
from bloombee.planner.neighbours import Neighbours, Rows
from bloombee.protocol.failures import to_message
from bloombee.protocol.link_estimate import LEAST_BYTES, LinkEstimator
from bloombee.protocol.messages import AnyMessage, Operations, Output, Step, Timing
from bloombee.server.looping import Tokens
from bloombee.server.onward import Onward
from bloombee.server.payloads import Payloads
from bloombee.server.sessions import Asked, Finished, Outgoing, Refused, Session
from bloombee.server.traces import Moved, Traces
from bloombee.swarm.measured import MeasuredLink
from bloombee.telemetry import Registry, loop_us, now_us

logger = logging.getLogger(__name__)


LOSSLESS = "split"
"""The codec in place of a lossy one that the session's client did not agree to."""

Loop = Callable[[Session, Step, bytes, float], None]
"""Takes the next step of a loop that this stage closes by itself, its ids, and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingParts:
    """What sending takes. `neighbours` says how rows go where, and measures that."""

    peer: PeerId
    payloads: Payloads
    neighbours: Neighbours
    telemetry: Registry
    loop: Loop
    traces: Traces


class Sending:
    """Sends on what comes of steps."""

    def __init__(self, parts: SendingParts) -> None:
        self._peer = parts.peer
        self._payloads = parts.payloads
        self._neighbours = parts.neighbours
        self._loop = parts.loop
        self._traces = parts.traces
        self._replayed = parts.telemetry.counter("replayed_tokens")
        self._chosen = parts.telemetry.counter("tokens_chosen")

    def estimator(self, session: Session) -> LinkEstimator:
        """What is measured of the way to the session's client."""
        return self._neighbours.estimator(session.owner)

    async def run(self, session: Session) -> None:
        """Send on whatever comes, for as long as the epoch lasts."""
        outbox, window = session.outbox, session.window
        self._traces.open(session.id, session.owner, session.context.terms.span, now_us())
        while True:
            item = await outbox.get()
            try:
                await self._send(session, item)
            except BloomBeeError as error:
                await self._fail_item(session, item, error)
            window.answered()
            if not isinstance(item, Finished | Refused | Asked):
                continue
            if isinstance(item, Asked):
                window.forget(item.payload_bytes)
            else:
                window.leave(item.payload_bytes)

    async def deliver(self, session: Session) -> None:
        """Tell the client of tokens, in order, for as long as the epoch lasts."""
        mail = session.mail
        while True:
            letter = await mail.first()
            output = letter.output
            try:
                if await self.tell(session, output, letter.body):
                    session.sent_step = max(session.sent_step, output.step)
            except RequestError as error:
                await self.fail(session, error, output.epoch, output.step)
            mail.sent()

    async def fail(self, session: Session, error: BloomBeeError, epoch: int, step: int = 0) -> None:
        """Tell the session's client of an error of `epoch`, of one step or (0) of the session."""
        if session.stands:
            await self.tell(session, to_message(error, session=session.id, epoch=epoch, step=step))

    async def tell(self, session: Session, message: AnyMessage, body: Buffer = b"") -> bool:
        """Send something to the client; False when it is gone or takes nothing.

        Raises RequestError for more than a frame holds.
        """
        client = session.client
        if client is None:
            return False
        session.telling_since_s = session.clock()
        try:
            if len(body) >= LEAST_BYTES and session.client_is_timed:
                session.rows_told = True
                link = MeasuredLink(client, session.id, self.estimator(session))
                await link.send(message, body)
            else:
                await client.send(message, body)
        except RequestError:
            raise
        except BloomBeeError as error:
            logger.debug("client %s is gone: %s", session.owner, error)
            return False
        finally:
            session.telling_since_s = math.inf
        return True

    async def _send(self, session: Session, item: Outgoing) -> None:
        match item:
            case Finished():
                if item.told.outcome.error is not None:
                    await self._fail_item(session, item, item.told.outcome.error)
                elif item.told.tokens is not None:
                    await self._tokens(session, item, item.told.tokens)
                elif item.told.outcome.rows is not None:
                    await self._result(session, item, item.told.outcome.rows)
            case Refused():
                await self._fail_item(session, item, item.error)
            case Asked():
                await self._replay(session, item)
            case _:
                await session.mail.empty()
                await self.tell(session, item)

    async def _fail_item(self, session: Session, item: Outgoing, error: BloomBeeError) -> None:
        await session.mail.empty()
        match item:
            case Finished() | Refused():
                await self.fail(session, error, item.step.epoch, item.step.step)
            case Asked():
                await self.fail(session, error, item.replay.epoch, item.replay.step)
            case _:
                await self.fail(session, error, item.epoch)

    async def _result(
        self, session: Session, item: Finished, rows: Float[torch.Tensor, "R D"]
    ) -> None:
        step = item.step
        ends_here = step.replay and step.until == session.context.terms.span.end
        if ends_here:
            rows = rows[:0]
        there = session.onward if not ends_here else None
        codec = self._codec(session, there, step.phase, rows, item.told.outcome.compute_us / 1e6)
        started_us = now_us()
        payload, body = await self._payloads.encode(rows, session.wire_dtype, codec)
        timings = self._timings(item, now_us() - started_us)
        if ends_here or session.is_last:
            sent_us = loop_us() if step.trace else 0
            output = Output(session.id, step.epoch, step.step, payload, timings, sent_us=sent_us)
            await session.mail.empty()
            if await self.tell(session, output, body):
                session.sent_step = max(session.sent_step, step.step)
            self._note(item, rows.shape[0], memoryview(body).nbytes, rows.nbytes)
            return
        left_ms = _left_ms(item.expires_s, session)
        onward = msgspec.structs.replace(
            step, payload=payload, timings=timings, deadline_ms=left_ms
        )
        await self._push(session, session.onward, onward, body)
        self._note(item, rows.shape[0], memoryview(body).nbytes, rows.nbytes)

    async def _tokens(self, session: Session, item: Finished, tokens: Tokens) -> None:
        """Tell the client of tokens, and go on with the loop, if it goes on."""
        step, mail = item.step, session.mail
        await mail.room()
        output = tokens.output(session.id, step.epoch, step.step)
        if timings := self._timings(item):
            output = msgspec.structs.replace(output, timings=timings, sent_us=loop_us())
        mail.post(output, tokens.body, tokens.kept_bytes)
        self._chosen.add(len(tokens.chosen))
        following = tokens.following(step)
        if following is None:
            self._note(item, len(tokens.chosen), len(tokens.body), len(tokens.body))
            return
        try:
            await self._go_on(session, *following, item.expires_s)
            self._note(item, len(tokens.chosen), len(following[1]), len(following[1]))
        except BloomBeeError as error:
            await mail.empty()
            await self.fail(session, error, step.epoch, step.step + 1)

    async def _go_on(self, session: Session, step: Step, ids: bytes, expires_s: float) -> None:
        """Have the next step of a loop taken by the first stage, which may be this one."""
        if session.halted is not None:
            raise type(session.halted)(str(session.halted))
        step = msgspec.structs.replace(step, deadline_ms=_left_ms(expires_s, session))
        if session.is_first:
            self._loop(session, step, ids, expires_s)
        elif session.ring is None:
            raise RequestError("the last stage was opened without a ring: it can't go on")
        else:
            await self._push(session, session.ring, step, ids)

    async def _replay(self, session: Session, item: Asked) -> None:
        """Make a step of rows in the journal, and send it on."""
        replay, held = item.replay, session.held
        if held.journal is None:
            raise RequestError("the last stage has no rows to replay")
        try:
            rows = held.journal.rows(item.table)
        except BloomBeeError as error:
            held.broken = held.broken or str(error)
            raise
        codec = self._codec(session, session.onward, "prefill", rows)
        payload, body = await self._payloads.encode(rows, session.wire_dtype, codec)
        step = Step(
            session=session.id,
            epoch=replay.epoch,
            step=replay.step,
            phase="prefill",
            sequences=replay.sequences,
            first_positions=replay.first_positions,
            counts=replay.counts,
            payload=payload,
            want="none",
            operations=Operations(releases=replay.releases),
            replay=True,
            deadline_ms=_left_ms(item.expires_s, session),
            until=replay.until,
            as_of=replay.as_of,
            # Rows of sequences whose operations are done here already are rows after them.
            included=tuple(sorted({*replay.included, *held.book.included})),
        )
        await self._push(session, session.onward, step, body)
        self._replayed.add(item.table.tokens)

    def _codec(
        self,
        session: Session,
        onward: Onward | None,
        phase: str,
        rows: Float[torch.Tensor, "R D"],
        compute_s: float = 0.0,
    ) -> str:
        """How rows travel to the next stage, or (None) to the client."""
        peer = session.owner if onward is None else onward.hop.peer
        about = Rows(
            phase=phase, raw_bytes=rows.nbytes, dtype=session.wire_dtype, compute_s=compute_s
        )
        choice = self._neighbours.choose(peer, about, loop_us())
        if choice.is_new:
            logger.info("%s rows to %s go %s: %s", phase, peer[-8:], choice.codec, choice.reason)
        if session.lossless and choice.codec in LOSSY:
            return LOSSLESS
        return choice.codec

    async def _push(
        self, session: Session, onward: Onward | None, step: Step, body: Buffer
    ) -> None:
        """Send a step to another stage.

        Raises HopLost, RequestError for more than a frame holds.
        """
        if onward is None:
            raise RequestError("there is no stage after this one")
        link = onward.link or await onward.wait()
        onward.sending_since_s = session.clock()
        clock_us = link.estimator.clock_us
        if clock_us is not None:
            step = msgspec.structs.replace(step, sent_us=max(0, loop_us() + clock_us))
        try:
            await link.send(step, body)
        except TransportError as error:
            raise HopLost(str(onward.lost or f"lost {onward}: {error}")) from None
        finally:
            onward.sending_since_s = math.inf
        if not onward.ring:  # what goes round counts when the client is told
            session.sent_step = max(session.sent_step, step.step)

    def _timings(self, item: Finished, encode_us: int = 0) -> tuple[Timing, ...]:
        """The timings that leave with what came of a step, which is about to be sent."""
        times = item.times
        times.encode_us, times.handed_us = encode_us, now_us()
        if not item.step.trace:
            return item.step.timings
        return (*item.step.timings, times.timing(self._peer))

    def _note(self, item: Finished, rows: int, size: int, raw_size: int) -> None:
        """What came of a step has gone, in `size` bytes."""
        step = item.step
        if not step.replay:
            moved = Moved(rows, item.payload_bytes, size, raw_size)
            self._traces.note(step.session, step.phase, item.times, moved, now_us())


def _left_ms(expires_s: float, session: Session) -> int:
    """What is left of a step's time, 0 when it has no end. Raises DeadlineExceeded."""
    if math.isinf(expires_s):
        return 0
    left_s = expires_s - session.clock()
    if left_s <= 0:
        raise DeadlineExceeded("the step's time was up before it could be sent on")
    return max(1, int(left_s * 1000))
