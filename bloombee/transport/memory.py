"""Streams inside one process and one event loop, with seeded delay, loss and faults.

A `MemoryNetwork` hands out listeners and dialers by peer. Time comes from the
event loop (or another `Clock`), so that a loop with virtual time runs seconds of
traffic at once. Faults:

- `kill`: a process dies, its streams break, nobody reaches it until `revive`;
- `cut` (one way), `partition` (both): packets vanish, nothing breaks, nothing
  arrives until `mend` or `heal`; then all of it does, in order, as TCP has it;
- `isolate`: no packet leaves or reaches a peer. A stopped process is more than
  that, since its timers stand still too: that is for the event loop of the tests;
- `streams_between`, to `reset` or `end` streams from outside;
- frames that are dropped, repeated, overtaken, or break their stream: by the
  probabilities of a `LinkShape`, or chosen one by one by `observer`.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from typing import TYPE_CHECKING

from bloombee.errors import (
    AuthError,
    DeadlineExceeded,
    SettingsError,
    TransportError,
)
from bloombee.transport import serving
from bloombee.transport.interface import Endpoint, StreamHandler, TransportLimits
from bloombee.transport.links import Clock, Fate, Link, LinkShape, NetworkClock, Observer
from bloombee.transport.memory_stream import MemoryStream, Owner, connected_streams
from bloombee.transport.tasks import TaskOwner

if TYPE_CHECKING:
    from collections.abc import Iterable


class MemoryNetwork:
    """All peers, links and streams of one emulated network.

    `link` is the shape of every direction not set with `shape`. The same seed and
    the same order of sends give the same delays and losses. `observer`, when set,
    sees every frame that is sent.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        link: LinkShape | None = None,
        limits: TransportLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits or TransportLimits()
        self._seed = seed
        self._shape = link or LinkShape()
        self._clock = clock
        self._context = contextvars.copy_context()
        self._links: dict[tuple[str, str], Link] = {}
        self._listeners: dict[str, MemoryListener] = {}
        self.observer: Observer | None = None
        self._streams: Owner = {}
        self._unaware: Owner = {}
        self._dead: set[str] = set()
        self._ports = itertools.count(1)
        self._healed = asyncio.Event()

    @property
    def clock(self) -> Clock:
        """The clock given, or the running event loop."""
        return NetworkClock(self._clock or asyncio.get_running_loop(), self._context)

    def listener(
        self, peer: str, address: str = "", *, limits: TransportLimits | None = None
    ) -> MemoryListener:
        """A listener of `peer` at `address` (a free one when empty), not yet started."""
        address = address or f"memory:{next(self._ports)}"
        return MemoryListener(self, peer, address, limits or self.limits)

    def dialer(self, peer: str, *, limits: TransportLimits | None = None) -> MemoryDialer:
        """A dialer that acts as `peer`."""
        return MemoryDialer(self, peer, limits or self.limits)

    def link(self, source: str, target: str) -> Link:
        """The direction from `source` to `target`."""
        if (source, target) not in self._links:
            ends = source, target
            self._links[ends] = Link(self._seed, ends, self._shape, self._observe)
        return self._links[source, target]

    def shape(self, source: str, target: str, shape: LinkShape) -> None:
        """Set one direction's shape, for frames sent from now on."""
        self.link(source, target).shape = shape

    def streams_between(self, source: str, target: str) -> list[MemoryStream]:
        """The ends at `source` of its streams with `target`, oldest first."""
        return [each for each in self._streams if (each.local, each.remote) == (source, target)]

    def kill(self, peer: str) -> None:
        """End `peer` as kill -9 would: its streams break, its handlers are cancelled.

        Afterwards its dialers fail and dialing it is refused, until `revive`. Whoever
        is cut off from it learns of its death when the link is mended.
        """
        self._dead.add(peer)
        for listener in [each for each in self._listeners.values() if each.peer == peer]:
            listener.handlers.cancel()
            del self._listeners[listener.address]
        for stream in [each for each in self._streams if peer in (each.local, each.remote)]:
            if stream.local == peer and self.link(peer, stream.remote).cut:
                stream.die()
                self._unaware[stream] = None
            elif not (stream.remote == peer and self.link(peer, stream.local).cut):
                stream.abort(TransportError(f"the connection to {peer} was reset"))

    def revive(self, peer: str) -> None:
        """Let a killed peer dial and listen again; its old listeners stay gone."""
        self._dead.discard(peer)

    def cut(self, source: str, target: str) -> None:
        """Let nothing arrive from `source` at `target`; the other way stays as it is."""
        self.link(source, target).cut = True

    def mend(self, source: str, target: str) -> None:
        """Undo `cut`; what was sent meanwhile arrives now, in order."""
        self._mend([self.link(source, target)])

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut all links between peers of different groups; peers not named keep theirs."""
        sides = [tuple(group) for group in groups]
        for left, right in itertools.permutations(sides, 2):
            for source, target in itertools.product(left, right):
                self.cut(source, target)

    def isolate(self, peer: str, others: Iterable[str]) -> None:
        """Cut `peer` off from `others`, both ways."""
        self.partition([peer], [other for other in others if other != peer])

    def heal(self) -> None:
        """Mend all links."""
        self._mend(self._links.values())

    def _mend(self, links: Iterable[Link]) -> None:
        for link in links:
            link.cut = False
        self._healed.set()
        self._healed = asyncio.Event()
        for stream in list(self._streams):
            stream.flush()
        for stream in [s for s in self._unaware if not self.link(s.local, s.remote).cut]:
            del self._unaware[stream]
            stream.bury()

    def _observe(self, source: str, target: str, frame: bytes) -> Fate | None:
        return self.observer(source, target, frame) if self.observer else None

    # For listeners and dialers of this network.

    def register(self, listener: MemoryListener) -> None:
        """Make a listener reachable; raises SettingsError when its address is taken."""
        if listener.address in self._listeners:
            raise SettingsError(f"{listener.address} is in use: choose another address")
        self._listeners[listener.address] = listener

    def unregister(self, listener: MemoryListener) -> None:
        """Refuse further dials to a listener."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    async def open(self, dialer: MemoryDialer, endpoint: Endpoint) -> MemoryStream:
        """Connect after one round trip; see `Dialer.dial` for what it raises."""
        target = self._listeners.get(endpoint.address)
        owner = target.peer if target else endpoint.peer
        await self._cross(dialer.peer, owner)
        target = self._listeners.get(endpoint.address)
        if dialer.peer in self._dead or target is None:
            await self._cross(owner, dialer.peer)
            raise TransportError(f"{endpoint.address} refused the connection: no server listens")
        if (target.peer, target.certificate_hash) != (endpoint.peer, endpoint.certificate_hash):
            await self._cross(owner, dialer.peer)
            raise AuthError(f"{endpoint.address} is {target.peer}, not {endpoint.peer}")
        stream = self._connect(dialer, target)
        try:
            await self._cross(owner, dialer.peer)
        except BaseException:
            stream.abort(TransportError(f"{dialer.peer} gave up dialing"))
            raise
        return stream

    async def _cross(self, source: str, target: str) -> None:
        """Wait as long as an empty packet takes, on a cut link until it is mended."""
        link, clock = self.link(source, target), self.clock
        arrived = asyncio.Event()
        if (wait_s := link.arrival(now := clock.time(), 0) - now) > 0:
            clock.call_later(wait_s, arrived.set)
            await arrived.wait()
        while link.cut:
            await self._healed.wait()

    def _connect(self, dialer: MemoryDialer, target: MemoryListener) -> MemoryStream:
        out, back = self.link(dialer.peer, target.peer), self.link(target.peer, dialer.peer)
        near, far = connected_streams(
            (dialer.peer, out, dialer.limits),
            (target.peer, back, target.limits),
            clock=self.clock,
            owners=(self._streams, dialer.streams),
        )
        target.serve(far)
        return near


class MemoryListener:
    """`Listener` of one peer; `certificate_hash` stands for the certificate it would show."""

    def __init__(
        self, network: MemoryNetwork, peer: str, address: str, limits: TransportLimits
    ) -> None:
        self.peer = peer
        self.limits = limits
        self.certificate_hash = b""
        self.handlers = TaskOwner()
        self._network = network
        self._address = address
        self._handler: StreamHandler | None = None
        self._context = contextvars.copy_context()

    @property
    def address(self) -> str:
        """What dialers reach it by."""
        return self._address

    @property
    def endpoint(self) -> Endpoint:
        """What a peer's record would carry."""
        return Endpoint(self.peer, self.address, self.certificate_hash)

    async def start(self, handler: StreamHandler) -> None:
        """Begin to accept; raises SettingsError when the address is taken.

        Handlers run in a copy of the caller's context, not in that of who dials.
        """
        self._handler = handler
        self._context = contextvars.copy_context()
        self._network.register(self)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to `grace_s` for handlers, then cancel them."""
        self._network.unregister(self)
        await self.handlers.stop(grace_s)

    def serve(self, stream: MemoryStream) -> None:
        """Run the handler on an accepted stream, in a task of its own."""
        if self._handler is None:
            raise TransportError(f"{self.address} is not listening")
        self._context.copy().run(serving.start, self.handlers, self._handler, stream)


class MemoryDialer:
    """`Dialer` of one peer."""

    def __init__(self, network: MemoryNetwork, peer: str, limits: TransportLimits) -> None:
        self.peer = peer
        self.limits = limits
        self.streams: Owner = {}
        self._network = network
        self._closed = False

    async def dial(self, endpoint: Endpoint, deadline_s: float) -> MemoryStream:
        """A new stream; raises TransportError, DeadlineExceeded or AuthError."""
        if self._closed:
            raise TransportError("the dialer is closed")
        try:
            async with asyncio.timeout(deadline_s):
                return await self._network.open(self, endpoint)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{endpoint.address} did not answer within {deadline_s:g} s"
            ) from None

    async def close(self) -> None:
        """Break all streams it opened."""
        self._closed = True
        for stream in list(self.streams):
            stream.abort(TransportError("the dialer was closed"))
        self.streams.clear()
