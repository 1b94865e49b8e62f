"""One peer's membership in the swarm: daemon, DHT node, published record.

Everything here runs in the event loop of one thread; `node.SwarmNode` is its
face towards the other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from bloombee.core import Span
from bloombee.errors import SettingsError, SwarmError
from bloombee.swarm.addresses import host_and_port, parse_peers
from bloombee.swarm.contact import Contact
from bloombee.swarm.keys import model_keys, span_keys
from bloombee.swarm.options import NodeOptions, daemon_options
from bloombee.swarm.outage import Outage
from bloombee.swarm.publisher import Publisher
from bloombee.swarm.records import (
    MAX_BLOCKS,
    ModelAnnouncement,
    ServerRecord,
    decode_model,
    decode_server,
)
from bloombee.swarm.runtime_folder import RuntimeFolder
from bloombee.swarm.supervisor import Life, Supervisor
from bloombee.swarm.view import SwarmSnapshot, assemble, elect_models

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from bloombee.swarm.addresses import PeerAddress
    from bloombee.swarm.dht import Dht, StoredValue
    from bloombee.swarm.identity import Identity

_MAX_MODELS = 64
"""Models looked up for an overview; the most announced come first."""
_LEFT = "this node has left the swarm"
_CLOSE_STEP_S = 1.0
_MAX_DOUBLINGS = 10
_log = logging.getLogger(__name__)


class Membership:
    """Built by `start`; `run` must run beside the calls; ended by `close`."""

    def __init__(
        self,
        options: NodeOptions,
        identity: Identity,
        supervisor: Supervisor,
        peers: tuple[PeerAddress, ...],
    ) -> None:
        self._options = options
        self._supervisor = supervisor
        self._publisher = Publisher(self._store, identity, options.record_lifetime_s)
        self._contact = Contact(peers, options.record_lifetime_s / 2, supervisor.renew)
        self._outage = Outage()
        self._undo = contextlib.AsyncExitStack()
        self._due = asyncio.Event()
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._error: SwarmError | None = None
        self.addresses: tuple[str, ...] = ()
        self.control = supervisor.life.daemon.control

    @classmethod
    async def start(cls, options: NodeOptions, identity: Identity) -> Self:
        """Start the daemon and join the swarm.

        Raises SettingsError for addresses, ports and identities that can't be used,
        SwarmError when no initial peer answers or the clock is too far off.
        """
        peers = _others(parse_peers(options.initial_peers), identity)
        async with contextlib.AsyncExitStack() as undo:
            if identity.path is not None:
                undo.callback(os.close, _claim(identity.path))
            folder = RuntimeFolder.create()
            undo.callback(folder.remove)
            begin = partial(_begin, options, identity, peers, folder)
            first = await begin(options.port, None)
            undo.callback(first.daemon.kill)
            port = _listening_port(await first.dht.addresses())
            supervisor = Supervisor(first, partial(begin, port), options.probe_s)
            undo.callback(supervisor.kill)
            member = cls(options, identity, supervisor, peers)
            await member._contact.join(first.dht)
            member.addresses = await first.dht.addresses()
            member._undo = undo.pop_all()
        return member

    async def run(self) -> SwarmError:
        """Keep the daemon running and the record fresh until `close`; returns why it ended.

        That is also the daemon, when it can't be started any more, or a fault of ours.
        """
        try:
            self._error = await self._live()
        except Exception as fault:  # noqa: BLE001 - whatever it is, it ends the node loudly
            _log.exception("the DHT thread failed")
            self._error = SwarmError(
                f"the DHT thread failed ({fault!r}); this process is no longer in the swarm, "
                "restart it and report this"
            )
        finally:
            self._left.set()
        if not self._leaving.is_set():
            _log.error("%s", self._error)
            self._supervisor.give_up(self._error)
        return self._error

    async def _live(self) -> SwarmError:
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(self._tend())
            keeping = group.create_task(
                self._supervisor.keep(self._outage.announced, self._due.set)
            )
            leaving = group.create_task(self._leaving.wait())
            await asyncio.wait((keeping, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in (tending, keeping, leaving):
                task.cancel()
        return SwarmError(_LEFT) if leaving.done() else keeping.result()

    async def _tend(self) -> None:
        every_s = self._options.refresh_s
        failures = 0
        while True:
            await self._due_within(min(every_s, 2.0**failures) if failures else every_s)
            try:
                async with asyncio.timeout(self._options.call_deadline_s):
                    await self._supervisor.do(self._contact.regain)
                    await self._publisher.refresh()
            except (SwarmError, TimeoutError) as error:
                failures = min(failures + 1, _MAX_DOUBLINGS)
                self._outage.goes_on(str(error) or "no answer in time")
            else:
                failures = 0
                self._outage.is_over()
                await self._supervisor.do(self._contact.keep)

    async def _due_within(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._due.wait()
        self._due.clear()

    async def _store(
        self, keys: Sequence[str], values: Sequence[bytes], owner: bytes, expires_at_s: float
    ) -> None:
        await self._supervisor.do(lambda dht: dht.store(keys, values, owner, expires_at_s))

    @property
    def clock_skew_s(self) -> float:
        """How far the clocks of the initial peers are ahead of ours."""
        return self._contact.clock_skew_s

    def publisher(self) -> Publisher:
        """To publish with. Raises SwarmError when this node is out of the swarm for good."""
        self._check()
        return self._publisher

    def _check(self) -> None:
        if self._error is not None:
            raise SwarmError(str(self._error))

    async def snapshot(self, fingerprint: str | None, num_blocks: int | None) -> SwarmSnapshot:
        """What the swarm holds now; see SwarmNode.snapshot."""
        self._check()

        async def look(dht: Dht) -> SwarmSnapshot:
            if self._options.client_mode:
                await self._contact.regain(dht)
            found = await _look(dht, fingerprint, num_blocks)
            if not found.records and (dht.forgive() or not dht.knows_peers):
                # Empty because those we knew have gone, or were away, or we were cut off.
                await self._contact.regain(dht)
                found = await _look(dht, fingerprint, num_blocks)
            return found

        return await self._supervisor.do(look)

    async def close(self) -> None:
        """Withdraw what is published, leave, end the daemon; takes 4 s at most. Never raises."""
        self._leaving.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_STEP_S / 2):
                await self._left.wait()
        life = self._supervisor.life
        if not life.daemon.has_ended:
            for work in (self._publisher.withdraw, life.dht.close):
                try:
                    async with asyncio.timeout(_CLOSE_STEP_S):
                        await work()
                except (SwarmError, TimeoutError) as error:
                    _log.debug("while leaving the swarm: %r", error)
            await life.daemon.stop()
        self._supervisor.give_up(self._error or SwarmError(_LEFT))
        await self._undo.aclose()


async def _begin(
    options: NodeOptions,
    identity: Identity,
    peers: tuple[PeerAddress, ...],
    folder: RuntimeFolder,
    port: int,
    last: Life | None,
) -> Life:
    """A life that listens on `port`; raises SettingsError when it is taken."""
    told = daemon_options(options, identity, peers, port)
    return await Life.begin(told, folder, last, client_mode=options.client_mode)


def _listening_port(addresses: Iterable[str]) -> int:
    """The port in a daemon's own addresses, asked for before routers have mapped it; 0 if none."""
    for address in addresses:
        target = host_and_port(address.partition("/p2p/")[0])
        if target is not None:
            return target[1]
    return 0


async def _look(dht: Dht, fingerprint: str | None, num_blocks: int | None) -> SwarmSnapshot:
    announcements: list[ModelAnnouncement] = []
    if fingerprint is None or num_blocks is None:
        announcements = _announcements(await dht.fetch(model_keys()))
        models = [
            (entry.fingerprint, entry.num_blocks)
            for entry in elect_models(announcements)
            if fingerprint in (None, entry.fingerprint)
        ][:_MAX_MODELS]
    else:
        models = [(fingerprint, num_blocks)]
    records = _records(await dht.fetch(_record_keys(models)), {model for model, _ in models})
    return assemble(records, announcements, time.time())


def _announcements(found: Iterable[StoredValue]) -> list[ModelAnnouncement]:
    now_s = time.time()
    decoded = (decode_model(value.owner, value.sealed, now_s) for value in found)
    return [announcement for announcement in decoded if announcement is not None]


def _records(found: Iterable[StoredValue], wanted: set[str]) -> list[ServerRecord]:
    """The live records of these fingerprints, in all their copies."""
    now_s = time.time()
    decoded = (decode_server(value.owner, value.sealed, now_s) for value in found)
    return [record for record in decoded if record and record.fingerprint in wanted]


def _record_keys(models: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    return tuple(
        key
        for fingerprint, num_blocks in models
        for key in span_keys(fingerprint, Span(0, min(num_blocks, MAX_BLOCKS)))
    )


def _others(peers: Iterable[PeerAddress], identity: Identity) -> tuple[PeerAddress, ...]:
    return tuple(peer for peer in peers if peer.peer != identity.peer_id)


def _claim(path: Path) -> int:
    """Lock the identity file for this process; returns the descriptor that holds the lock."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SettingsError(
            f"identity file {path} is in use by another process; give each process its own"
        ) from None
    except OSError as error:  # some network file systems know no locks
        _log.debug("identity file %s can't be locked: %s", path, error)
    return descriptor
