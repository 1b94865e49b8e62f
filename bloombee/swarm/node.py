"""This process as a member of the swarm, for use from any thread and event loop.

    identity = Identity.load_or_create(path)
    node = await SwarmNode.start(NodeOptions(initial_peers=...), identity)
    await node.publish(record)                  # and refreshed until withdrawn
    snapshot = await node.snapshot(fingerprint)
    await node.withdraw()                       # readers see it gone at once
    await node.close()

The DHT runs in a thread with an event loop of its own; the libp2p daemon is a
child process that dies with this one, and is started again when it dies before. No
process is forked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from bloombee.errors import DeadlineExceeded, SwarmError
from bloombee.swarm.loop_thread import LoopThread
from bloombee.swarm.membership import Membership
from bloombee.swarm.options import NodeOptions

if TYPE_CHECKING:
    import concurrent.futures

    from bloombee.core import PeerId
    from bloombee.swarm.identity import Identity
    from bloombee.swarm.records import ServerRecord
    from bloombee.swarm.view import SwarmSnapshot

__all__ = ["NodeOptions", "SwarmNode"]

PUBLISH_S = 20.0
"""For the swarm to take a record."""
FIRST_PAUSE_S = 0.5
"""Between two attempts, doubled each time."""
_CLOSE_DEADLINE_S = 4.5


class SwarmNode:
    """A running DHT node. `maddrs` are what others pass as initial peers.

    `control` is the socket of its libp2p daemon, for the streams of `transport.p2p`.
    Every call has a deadline and raises DeadlineExceeded after it. `clock_skew_s` is
    how far the clocks of the initial peers are ahead of ours.
    """

    def __init__(
        self, options: NodeOptions, identity: Identity, member: Membership, thread: LoopThread
    ) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.maddrs = member.addresses
        self.clock_skew_s = member.clock_skew_s
        self.control = member.control
        self._deadline_s = options.call_deadline_s
        self._member = member
        self._thread = thread
        self._lost: concurrent.futures.Future[SwarmError] = thread.begin(member.run())
        self._closed = False

    @classmethod
    async def start(cls, options: NodeOptions, identity: Identity) -> Self:
        """Start the libp2p daemon and join the swarm (start one, without initial peers).

        Raises SettingsError for malformed addresses, taken ports and an identity in
        use; SwarmError when no initial peer answers or the clocks are too far apart.
        """
        thread = LoopThread("bloombee-dht")
        try:
            starting = Membership.start(options, identity)
            member = await thread.run(starting, "joining the swarm", options.start_deadline_s)
        except BaseException:
            thread.stop(deadline_s=1.0)
            raise
        return cls(options, identity, member, thread)

    async def publish(self, record: ServerRecord) -> None:
        """Put `record` into the DHT in place of any before it, and keep it fresh.

        Its time of publishing is set here. Raises SwarmError when no node takes it for
        PUBLISH_S or this node is out of the swarm, ValueError when readers would refuse it.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PUBLISH_S
        pause_s = FIRST_PAUSE_S

        async def work() -> None:
            await self._member.publisher().publish(record)

        while True:
            try:
                await self._thread.run(work(), "publishing the record", self._deadline_s)
            except (SwarmError, DeadlineExceeded):
                # Neighbours may have just died, or be too busy for the moment.
                if self._lost.done() or loop.time() + pause_s > until_s:
                    raise
                await asyncio.sleep(pause_s)
                pause_s *= 2
            else:
                return

    async def withdraw(self) -> None:
        """Take the record out of the DHT: readers see it gone at once. May be repeated.

        Raises SwarmError when no node answers or this node is out of the swarm.
        """

        async def work() -> None:
            await self._member.publisher().withdraw()

        await self._thread.run(work(), "withdrawing the record", self._deadline_s)

    async def snapshot(
        self, fingerprint: str | None = None, num_blocks: int | None = None
    ) -> SwarmSnapshot:
        """All live records, of one model or (None) of every model that is announced.

        With fingerprint and `num_blocks` one round of lookups does, else it takes two.
        Raises SwarmError when the swarm can't be reached.
        """
        work = self._member.snapshot(fingerprint, num_blocks)
        return await self._thread.run(work, "looking up the swarm", self._deadline_s)

    async def lost(self) -> SwarmError:
        """Wait until the node is out of the swarm for good; returns why. Also at `close`.

        That takes a libp2p daemon that ended and could not be started again, several times
        over; a daemon that can is no loss.
        """
        return await asyncio.shield(asyncio.wrap_future(self._lost))

    async def close(self) -> None:
        """Withdraw, leave the swarm and end the daemon, within 5 s. May be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._thread.run(self._member.close(), "leaving the swarm", _CLOSE_DEADLINE_S)
        finally:
            self._thread.stop(deadline_s=0.5)
