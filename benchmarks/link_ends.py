"""The two ends of one measured link, each a process: for `benchmarks/links.py`.

JSON lines: a `Job` in. The listener answers with where it is reached; the dialer takes
`Burst`s, sends steps over the link as a stage would, and answers what it has measured of it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec
import uvloop

from bloombee.protocol.link_estimate import LinkEstimator
from bloombee.protocol.messages import Attach, Attached, Beat, Payload, Step
from bloombee.protocol.pulse import Pulse
from bloombee.swarm.connection import Connection, ConnectionSettings, accept, connect
from bloombee.swarm.identity import Identity
from bloombee.swarm.measured import MeasuredLink, answer
from bloombee.telemetry import now_us
from bloombee.transport import certificates
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.interface import Endpoint
from bloombee.transport.shaped import dialer_over, line_of, listener_over

if TYPE_CHECKING:
    from bloombee.transport.interface import Stream

SESSION = bytes(16)
SETTINGS = ConnectionSettings()
BEAT_S = 0.5


class Job(msgspec.Struct, frozen=True):
    """Listen at `host`, or dial `peer` at `address`; `line` is one to play."""

    host: str = ""
    peer: str = ""
    address: str = ""
    certificate_hash: bytes = b""
    line: str | None = None


class Burst(msgspec.Struct, frozen=True):
    """Steps of these sizes in turn, one every `every_s`, for `seconds`."""

    sizes: list[int]
    every_s: float
    seconds: float


class Measured(msgspec.Struct, frozen=True):
    """What was measured; `when_s` are times since the burst began, beside the rate as of then."""

    mbps: float
    rtt_ms: float
    samples: int
    when_s: list[float]
    mbps_then: list[float]


def _say(message: msgspec.Struct) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


async def _serve(stream: Stream, identity: Identity, certificate_hash: bytes) -> None:
    connection = await accept(stream, identity, certificate_hash, settings=SETTINGS)
    while (received := await connection.receive()) is not None:
        message = received[0]
        if isinstance(message, Attach):
            await connection.send(Attached(message.session, message.epoch))
        elif isinstance(message, Beat):
            await connection.send(answer(message))


async def listen(job: Job, requests: asyncio.Queue[str]) -> None:
    """Answer beats until standard input ends."""
    identity = Identity.load_or_create(None)
    certificate = certificates.create(identity.peer_id)
    direct = DirectListener(job.host, 0, certificate)
    listener = listener_over(line_of(job.line), direct)
    await listener.start(lambda stream: _serve(stream, identity, certificate.hash))
    at = direct.endpoint
    _say(Job("", at.peer, at.address, at.certificate_hash))
    while await requests.get():
        pass
    await listener.stop(0.0)


async def dial(job: Job, requests: asyncio.Queue[str]) -> None:
    """Send bursts until standard input ends."""
    dialer = dialer_over(line_of(job.line), DirectDialer())
    endpoint = Endpoint(job.peer, job.address, job.certificate_hash)
    connection = await connect(dialer, endpoint, Identity.load_or_create(None), settings=SETTINGS)
    await connection.send(Attach(SESSION, SESSION, 0))
    await connection.receive(5.0)
    pulse = Pulse(4.0, asyncio.get_running_loop().time())
    link = MeasuredLink(connection, SESSION, LinkEstimator(), pulse)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(_read(connection, link))
        beating = tasks.create_task(_beat(link))
        while line := await requests.get():
            await _burst(link, msgspec.json.decode(line, type=Burst))
        reader.cancel()
        beating.cancel()
    await dialer.close()


async def _read(connection: Connection, link: MeasuredLink) -> None:
    while (received := await connection.receive()) is not None:
        if isinstance(received[0], Beat):
            link.heard(received[0])


async def _beat(link: MeasuredLink) -> None:
    while True:
        await link.beat()
        await link.probe()
        await asyncio.sleep(BEAT_S)


async def _burst(link: MeasuredLink, burst: Burst) -> None:
    began_us, number = now_us(), 0
    when_s, mbps_then = list[float](), list[float]()
    while now_us() - began_us < burst.seconds * 1e6:
        size = burst.sizes[number % len(burst.sizes)]
        number += 1
        payload = Payload("rows", "bfloat16", size // 1152, 576)
        step = Step(SESSION, 0, number, "decode", (0,), (number,), (1,), payload)
        await link.send(step, bytes(size))
        when_s.append((now_us() - began_us) / 1e6)
        mbps_then.append(link.estimator.bytes_per_s(now_us()) * 8 / 1e6)
        await asyncio.sleep(burst.every_s)
    estimator = link.estimator
    rtt_ms = estimator.rtt_s * 1e3
    _say(Measured(mbps_then[-1], rtt_ms, estimator.samples, when_s, mbps_then))


async def _main() -> None:
    requests: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(requests.put_nowait, line)
        loop.call_soon_threadsafe(requests.put_nowait, "")

    reading = loop.run_in_executor(None, read)
    job = msgspec.json.decode(await requests.get(), type=Job)
    print("ready", flush=True)
    await (dial(job, requests) if job.peer else listen(job, requests))
    await reading


if __name__ == "__main__":
    uvloop.run(_main())
