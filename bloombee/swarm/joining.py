"""Joining a swarm through its initial peers, some of which may be dead, and clocks.

Every peer is dialled at once with a deadline of its own. When one has answered,
the others get a short grace: a dead peer costs a moment, not the start.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloombee.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.swarm.addresses import PeerAddress
    from bloombee.swarm.dht import Dht

SKEW_WARNING_S = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinDeadlines:
    """How long one peer may take, and how long to wait for more after the first."""

    peer_s: float = 8.0
    grace_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer that answered. `skew_s`: how far its clock is ahead of ours.

    `sees_us` is False when it could not dial back.
    """

    address: PeerAddress
    skew_s: float
    sees_us: bool


async def join(
    dht: Dht, peers: Sequence[PeerAddress], deadlines: JoinDeadlines
) -> tuple[Joined, ...]:
    """Connect to all `peers` that answer and learn the rest of the swarm from them.

    Modifies the routing table of `dht`. Logs a warning for each peer that is
    skipped. Raises SwarmError when none answers.
    """
    failures: dict[PeerAddress, str] = {}
    joined: list[Joined] = []
    first = asyncio.Event()

    async def attempt(peer: PeerAddress) -> None:
        try:
            async with asyncio.timeout(deadlines.peer_s):
                reply = await dht.greet(peer)
            joined.append(Joined(peer, reply.skew_s, reply.sees_us))
            first.set()
        except TimeoutError:
            failures[peer] = f"no answer within {deadlines.peer_s:g} s"
        except Exception as error:  # noqa: BLE001 - hivemind raises whatever the daemon said
            failures[peer] = _reason(error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(peer)) for peer in peers]
        answered = group.create_task(first.wait())
        await _until_first(tasks, answered)
        await asyncio.wait(tasks, timeout=deadlines.grace_s)
        for task in (*tasks, answered):
            task.cancel()
    _complain(peers, joined, failures, deadlines)
    await dht.find_neighbours()
    return tuple(joined)


async def greet_quietly(dht: Dht, peers: Sequence[PeerAddress], peer_s: float) -> None:
    """Connect to those of `peers` that answer within `peer_s`; the others are no news."""

    async def attempt(peer: PeerAddress) -> None:
        try:
            async with asyncio.timeout(peer_s):
                await dht.greet(peer)
        except Exception as error:  # noqa: BLE001 - hivemind raises whatever the daemon said
            _log.debug("%s is still away: %s", _where(peer), _reason(error))

    async with asyncio.TaskGroup() as group:
        for peer in peers:
            group.create_task(attempt(peer))


async def _until_first(tasks: Sequence[asyncio.Task[None]], answered: asyncio.Task[bool]) -> None:
    waiting: set[asyncio.Task[None]] = set(tasks)
    while waiting and not answered.done():
        done, _ = await asyncio.wait({*waiting, answered}, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done


def _complain(
    peers: Sequence[PeerAddress],
    joined: Sequence[Joined],
    failures: dict[PeerAddress, str],
    deadlines: JoinDeadlines,
) -> None:
    alive = {entry.address for entry in joined}
    for peer in peers:
        if peer not in alive:
            failures.setdefault(peer, f"no answer {deadlines.grace_s:g} s after another's")
    if not joined:
        told = "; ".join(f"{_where(peer)}: {why}" for peer, why in failures.items())
        raise SwarmError(
            f"none of the {len(peers)} initial peers answered ({told}); check the addresses, "
            "or start a node with bloombee-dht and pass what it prints"
        )
    for peer, why in failures.items():
        _log.warning("initial peer %s is skipped: %s", _where(peer), why)


def check_clock(joined: Sequence[Joined], limit_s: float) -> float:
    """The median skew in seconds: how far the peers' clocks are ahead of ours.

    Logs a warning that names it from two seconds on. Raises SwarmError beyond
    `limit_s`, where records would expire before others read them.
    """
    skew_s = statistics.median(entry.skew_s for entry in joined)
    if abs(skew_s) < SKEW_WARNING_S:
        return skew_s
    direction = "behind" if skew_s > 0 else "ahead of"
    who = "the initial peer's" if len(joined) == 1 else f"those of {len(joined)} initial peers"
    told = f"the clock of this machine is {abs(skew_s):.1f} s {direction} {who}"
    mend = "set the clocks by NTP (for example: timedatectl set-ntp true)"
    if abs(skew_s) > limit_s:
        raise SwarmError(f"{told}: records would expire unread beyond {limit_s:g} s; {mend}")
    _log.warning("%s: records will expire early or late by that much; %s", told, mend)
    return skew_s


def _where(peer: PeerAddress) -> str:
    return f"{peer.transports[0]} ({peer.peer[-8:]})"


def _reason(error: Exception) -> str:
    """The last line of what libp2p said, which names the cause."""
    if isinstance(error, AssertionError | NameError | TypeError | AttributeError):
        raise error
    text = str(error) or type(error).__name__
    return text.strip().splitlines()[-1].strip(" *")[:200]
