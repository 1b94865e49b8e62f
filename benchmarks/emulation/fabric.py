"""What happens to packets between hosts: pure bookkeeping over times that it is given.

A packet passes the sender's line up, the path, and the receiver's line down. The last
is entered when the packet gets there, not when it is sent: of two senders at unequal
distance, the far one must not hold up the near one.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from benchmarks.emulation.line import Line
from benchmarks.emulation.plan import PairCount

if TYPE_CHECKING:
    from benchmarks.emulation.plan import Line as LinePlan
    from benchmarks.emulation.plan import Path, Plan

EARLY_S = 1e-5
"""Packets leave this much before their time rather than in a wake-up of their own."""


class _Pair:
    """One direction between two hosts."""

    __slots__ = (
        *("bytes", "chance", "cut", "delay_s", "down", "dropped", "latest_s", "line"),
        *("loss", "lost", "packets", "target", "up"),
    )

    def __init__(self, target: int, path: Path, lines: tuple[Line, Line, Line], seed: str) -> None:
        self.target = target
        self.up, self.line, self.down = lines
        self.delay_s = path.delay_s
        self.loss = path.loss
        self.chance = random.Random(seed).random
        self.cut = False
        self.latest_s = 0.0
        self.packets = self.bytes = self.dropped = self.lost = 0


class Fabric:
    """All lines and paths of a network, and the packets that are under way."""

    def __init__(self, plan: Plan) -> None:
        queue = (plan.queue_s, plan.queue_bytes)
        self.ups = [Line(line.up, *queue) for line in plan.lines]
        self.downs = [Line(line.down, *queue) for line in plan.lines]
        hosts = range(len(plan.names))
        self._pairs = [
            [
                _Pair(
                    target,
                    plan.paths[source][target],
                    (
                        self.ups[source],
                        Line(plan.paths[source][target].rate, *queue),
                        self.downs[target],
                    ),
                    f"{plan.seed} {source} {target}",
                )
                for target in hosts
            ]
            for source in hosts
        ]
        # When, tie-break, pair, packet; then its bytes on the line, how many packets it
        # is, and when its last byte comes to the line down (-1: it has passed that).
        self._under_way: list[tuple[float, int, _Pair, bytes, int, int, float]] = []
        self._sequence = 0
        self.delivered = 0
        self.late_s = 0.0

    # Packets -----------------------------------------------------------------------------

    def send(
        self, now_s: float, ends: tuple[int, int], packet: bytes, size: int, count: int
    ) -> None:
        """A host (first of `ends`) sends the other one a packet of `size` bytes on the line.

        `count` is how many packets it really is, when the kernel hands over several
        as one.
        """
        pair = self._pairs[ends[0]][ends[1]]
        if pair.cut:
            pair.lost += count
            return
        up = pair.up.take(now_s, now_s, size)
        times = up and pair.line.take(up[0], up[1], size)
        if times is None:
            pair.dropped += count
            return
        pair.packets += count
        pair.bytes += size
        if pair.loss and pair.chance() < pair.loss:
            pair.lost += count
            return
        delay_s = pair.delay_s
        first_s, last_s = times[0] + delay_s, times[1] + delay_s
        self._sequence += 1
        if pair.down.rate == inf:
            self._deliver_at(last_s, pair, packet)
        else:
            entry = (first_s, self._sequence, pair, packet, size, count, last_s)
            heappush(self._under_way, entry)

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """The packets that arrive by now: (host, packet), in order."""
        found: list[tuple[int, bytes]] = []
        under_way, until_s = self._under_way, now_s + EARLY_S
        while under_way and under_way[0][0] <= until_s:
            when_s, _, pair, packet, size, count, last_s = heappop(under_way)
            if last_s < 0.0:
                found.append((pair.target, packet))
                self.delivered += 1
                self.late_s += max(0.0, now_s - when_s)
                continue
            times = pair.down.take(when_s, last_s, size)
            if times is None:
                pair.dropped += count
            else:
                self._deliver_at(times[1], pair, packet)
        return found

    def _deliver_at(self, when_s: float, pair: _Pair, packet: bytes) -> None:
        """Packets of a pair stay in order, also when its delay has just shrunk."""
        pair.latest_s = when_s = max(when_s, pair.latest_s)
        self._sequence += 1
        heappush(self._under_way, (when_s, self._sequence, pair, packet, 0, 0, -1.0))

    @property
    def next_s(self) -> float:
        """When something is due next; infinite when nothing is under way."""
        return self._under_way[0][0] if self._under_way else inf

    # Changes -----------------------------------------------------------------------------

    def set_line(self, host: int, line: LinePlan) -> None:
        """A host's rates from now on."""
        self.ups[host].set_rate(line.up)
        self.downs[host].set_rate(line.down)

    def set_path(self, source: int, target: int, path: Path) -> None:
        """Rate, delay and loss of one direction from now on."""
        pair = self._pairs[source][target]
        pair.line.set_rate(path.rate)
        pair.delay_s, pair.loss = path.delay_s, path.loss

    def set_cut(self, source: int, target: int, *, cut: bool) -> None:
        """Whether packets of one direction vanish."""
        self._pairs[source][target].cut = cut

    def counts(self) -> tuple[tuple[PairCount, ...], ...]:
        """What every pair has sent, `[source][target]`."""
        return tuple(
            tuple(PairCount(p.packets, p.bytes, p.dropped, p.lost) for p in row)
            for row in self._pairs
        )
