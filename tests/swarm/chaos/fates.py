"""Carries out a schedule of faults: watches every frame, strikes, and undoes what passes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bloombee.protocol import framing
from bloombee.protocol.messages import Open, Step
from bloombee.transport.links import Fate, LinkShape
from tests.swarm.chaos.faults import At, Deed, Fault, On, Victim
from tests.virtual_time import process

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from bloombee.protocol.messages import AnyMessage
    from tests.swarm.chaos.world import Server, World

logger = logging.getLogger("bloombee.chaos")

ROUGH = {"drop": 0.04, "repeat": 0.04, "swap": 0.04}
LATE_S = 1.5
SLOW = 400.0


class Fates:
    """Set as the observer of a world's network for one run."""

    def __init__(self, world: World, schedule: Sequence[Fault], tasks: asyncio.TaskGroup) -> None:
        self.struck: list[Fault] = []
        self.events = 0
        self._world = world
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []
        self.seen: Counter[tuple[str, str]] = Counter()
        self._waiting = [fault for fault in schedule if isinstance(fault.when, On)]
        self._doomed: dict[tuple[str, str], list[Fate]] = {}
        self._trace = hashlib.sha256()
        self._servers: dict[str, Server] = {server.peer: server for server in world.servers}
        for fault in schedule:
            if isinstance(fault.when, At):
                self._begin(self._strike_at(fault, fault.when.seconds))

    @property
    def trace(self) -> str:
        """A hash over all frames sent, their times and order."""
        return self._trace.hexdigest()

    def observe(self, source: str, target: str, frame: bytes) -> Fate | None:
        """One frame on its way."""
        decoded = framing.decode(frame)
        if decoded is None:
            return None
        message = decoded[0]
        way = ("s" if source in self._servers else "c") + ("s" if target in self._servers else "c")
        self._note(source, target, message)
        fate = self._next_doom(source, target)
        for word in _words(message):
            self.seen[way, word] += 1
            now = On(way, word, self.seen[way, word])
            for fault in [f for f in self._waiting if f.when == now]:
                self._waiting.remove(fault)
                if fault.deed is Deed.FATE:
                    fate = self._doom(fault, source, target)
                else:
                    self._begin(self._strike(fault, source, target))
        return fate

    def end(self) -> None:
        """Strike no more."""
        self._waiting.clear()
        for task in self._running:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        with process(""):  # not that of who sends the frame, which may be frozen
            self._running.append(self._tasks.create_task(work))

    def _doom(self, fault: Fault, source: str, target: str) -> Fate:
        self.struck.append(fault)
        logger.debug("CHAOS %s", fault)
        doomed = self._doomed.setdefault((source, target), [])
        doomed += [fault.fate] * (fault.frames - 1)
        return fault.fate

    def _note(self, source: str, target: str, message: AnyMessage) -> None:
        self.events += 1
        step = getattr(message, "step", getattr(message, "number", 0))
        now = self._world.loop.time()
        names = self._world.name_of(source), self._world.name_of(target)
        line = f"{now:.6f} {names[0]}>{names[1]} {type(message).__name__} {step}"
        self._trace.update(line.encode())
        if logger.isEnabledFor(logging.DEBUG):
            epoch = getattr(message, "epoch", "")
            logger.debug("%s %s", line, f"epoch {epoch}" if epoch != "" else "")

    def _next_doom(self, source: str, target: str) -> Fate | None:
        doomed = self._doomed.get((source, target))
        return doomed.pop(0) if doomed else None

    async def _strike_at(self, fault: Fault, seconds: float) -> None:
        await asyncio.sleep(seconds)
        server = self._world.servers[fault.victim if isinstance(fault.victim, int) else 0]
        other = self._world.luck.choice([p for p in self._world.peers() if p != server.peer])
        await self._strike(fault, other, server.peer)

    async def _strike(self, fault: Fault, source: str, target: str) -> None:
        """Have it happen to an end of `source` > `target`, or to the server it names."""
        await asyncio.sleep(fault.delay_s)
        if isinstance(fault.victim, int):
            target = self._world.servers[fault.victim].peer
            if source == target:
                source = self._world.clients[0].identity.peer_id
        elif fault.victim is Victim.SOURCE:
            source, target = target, source
        self.struck.append(fault)
        logger.debug("CHAOS %s: %s", fault, self._world.name_of(target))
        if fault.deed in (Deed.CUT, Deed.PARTITION, Deed.ISOLATE, Deed.ROUGH, Deed.LATE):
            await self._spoil_links(fault, source, target)
        elif fault.deed in (Deed.RESET, Deed.END):
            for stream in self._world.network.streams_between(source, target):
                stream.reset() if fault.deed is Deed.RESET else stream.end()
        elif fault.deed is Deed.FREEZE:
            await self._freeze(fault, self._world.name_of(target))
        elif fault.deed is Deed.VANISH:
            self._vanish(source, target)
        else:
            server = self._servers.get(target) or self._servers.get(source)
            assert server is not None
            await self._befall(fault, server)

    async def _spoil_links(self, fault: Fault, source: str, target: str) -> None:
        network, peers = self._world.network, self._world.peers()
        both = [(source, target), (target, source)]
        if fault.deed in (Deed.ROUGH, Deed.LATE):
            for pair in both:
                network.shape(*pair, self._spoiled(fault.deed, network.link(*pair).shape))
            await self._last(fault)
            for pair in both:
                network.shape(*pair, self._plain())
            return
        pairs = both[:1]
        if fault.deed is Deed.PARTITION:
            pairs = both
        elif fault.deed is Deed.ISOLATE:
            pairs = [(target, peer) for peer in peers if peer != target]
            pairs += [(peer, target) for _, peer in pairs]
        for pair in pairs:
            network.cut(*pair)
        await self._last(fault)
        for pair in pairs:
            network.mend(*pair)

    def _plain(self) -> LinkShape:
        return LinkShape(self._world.plan.delay_s, self._world.plan.jitter_s)

    def _spoiled(self, deed: Deed, shape: LinkShape) -> LinkShape:
        return replace(shape, **ROUGH) if deed is Deed.ROUGH else replace(shape, delay_s=LATE_S)

    async def _freeze(self, fault: Fault, name: str) -> None:
        self._world.loop.freeze(name)
        await self._last(fault)
        self._world.loop.thaw(name)

    def _vanish(self, *ends: str) -> None:
        """Kill the client among the ends, or the last there is."""
        clients = self._world.clients
        met = [client for client in clients if client.identity.peer_id in ends]
        self._world.vanish(met[0] if met else clients[-1])

    async def _befall(self, fault: Fault, server: Server) -> None:
        world = self._world
        match fault.deed:
            case Deed.KILL:
                world.kill(server)
                await self._last(fault)
                await world.restart(server)
            case Deed.DRAIN | Deed.STOP:
                await world.end(server, fault.drain_s if fault.deed is Deed.DRAIN else 0.0)
                await self._last(fault)
                await world.restart(server)
            case Deed.BLACKOUT:
                gone = [s for s in world.servers if set(_blocks(s)) & set(_blocks(server))]
                for each in gone:
                    world.kill(each)
                await self._last(fault)
                for each in gone:
                    await world.restart(each)
            case Deed.FAIL:
                if server.model is not None:
                    server.model.failures.append(RuntimeError("injected"))
            case Deed.SLOW:
                server.slowness = SLOW
                await self._last(fault)
                server.slowness = 1.0
            case _:
                raise AssertionError(fault)

    async def _last(self, fault: Fault) -> None:
        """Wait until it passes; what lasts to the end is undone by `World.heal`."""
        await asyncio.sleep(1e6 if fault.lasts_s is None else fault.lasts_s)


def _blocks(server: Server) -> range:
    return range(server.span.start, server.span.end)


def _words(message: AnyMessage) -> tuple[str, ...]:
    kind = type(message).__name__
    if isinstance(message, Step):
        return (kind, "replay" if message.replay else message.phase)
    if isinstance(message, Open) and message.epoch > 0:
        return ("reopen",)
    return (kind,)
