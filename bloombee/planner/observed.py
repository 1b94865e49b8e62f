"""From what servers report of themselves and their links to a cluster to plan on.

Reports come from strangers. A server whose figures no machine has is left out, and why is
said; a link's figure that makes no sense counts as unknown. A link that nobody has measured is
taken to be as fast as the slower of its ends is known to be elsewhere, and counts as guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.clusters import WORKSPACE_ROWS_OF_HIDDEN
from bloombee.planner.profiles import RAW, Cluster, Codec, Network, PeerProfile, TimeTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bloombee.core import PeerId, Span
    from bloombee.planner.profiles import Floats, ModelFacts
    from bloombee.protocol.report_messages import CostTable, LinkReport, TimeGrid

LONGEST_PASS_S = 600.0
LONGEST_RTT_S = 30.0
FASTEST_BYTES_PER_S = 1e14
"""No memory is read faster: nobody computes a block sooner than its weights are read so."""
MOST_BYTES = 1 << 50
MOST_DOLLARS = MOST_WATTS = 1e7
UNKNOWN_BYTES_PER_S = 12.5e6
"""Of a link in a swarm where no link is known: 100 Mbit/s."""
UNKNOWN_RTT_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """One server as it describes itself; `rtt_s` from here to it and back (0: not measured)."""

    peer: PeerId
    span: Span
    costs: CostTable | None
    links: tuple[LinkReport, ...] = ()
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """`servers[i]` is peer i of `cluster`; `guessed` are links (source, target), by index.

    The last index is the client. `refused`: one line for each server left out.
    """

    cluster: Cluster
    servers: tuple[Seen, ...]
    guessed: frozenset[tuple[int, int]]
    refused: tuple[str, ...]


def observe(
    seen: Sequence[Seen], model: ModelFacts, codecs: tuple[Codec, ...] = (RAW,)
) -> Observed:
    """The cluster of these servers, in their order.

    Nothing is offloaded on it: servers keep weights and KV on the device.
    """
    problems = {server.peer: problem(server.costs, model) for server in seen}
    kept = tuple(server for server in seen if problems[server.peer] is None)
    refused = tuple(f"{peer}: {why}" for peer, why in problems.items() if why is not None)
    network, guessed = _network(kept)
    peers = tuple(profile(s.peer, s.costs, model) for s in kept if s.costs is not None)
    return Observed(Cluster(peers, network, codecs), kept, guessed, refused)


def problem(costs: CostTable | None, model: ModelFacts) -> str | None:
    """Why no plan can count on such a table; None when it can."""
    if costs is None:
        return "it tells no costs"
    least_s = model.block_bytes / FASTEST_BYTES_PER_S
    grids = {"decode": costs.decode, "prefill": costs.prefill, "head": costs.head}
    for name, grid in grids.items():
        if grid is not None and (wrong := _grid_problem(grid, least_s if name != "head" else 0.0)):
            return f"its table of {name} {wrong}"
    if not 0 <= costs.pass_s <= LONGEST_PASS_S:
        return f"a pass of {costs.pass_s} s"
    if not 0 < costs.device_bytes < MOST_BYTES or costs.host_bytes >= MOST_BYTES:
        return f"memory of {costs.device_bytes} and {costs.host_bytes} bytes"
    if not model.block_bytes / 16 <= costs.block_bytes <= model.block_bytes * 16:
        return f"blocks of {costs.block_bytes} bytes, where the model has {model.block_bytes}"
    return _declared_problem(costs)


def _declared_problem(costs: CostTable) -> str | None:
    dollars = (costs.price_per_hour, costs.purchase)
    watts = (costs.watts, costs.measured_watts)
    rates = (costs.host_device_bytes_per_s, costs.disk_bytes_per_s)
    for name, values, most in (
        ("price", dollars, MOST_DOLLARS),
        ("power", watts, MOST_WATTS),
        ("bandwidth", rates, FASTEST_BYTES_PER_S),
    ):
        if not all(0 <= value <= most for value in values):
            return f"a {name} of {max(values, key=abs)}"
    return None


def _grid_problem(grid: TimeGrid, least_s: float) -> str | None:
    if len(grid.seconds) != len(grid.rows) or any(
        len(line) != len(grid.contexts) for line in grid.seconds
    ):
        return "has holes"
    for axis in (grid.rows, grid.contexts):
        if any(left >= right for left, right in zip(axis, axis[1:], strict=False)):
            return "doesn't ascend"
    for seconds in (each for line in grid.seconds for each in line):
        if not least_s <= seconds <= LONGEST_PASS_S:
            return f"has a pass of {seconds} s"
    return None


def profile(peer: PeerId, costs: CostTable, model: ModelFacts) -> PeerProfile:
    """What the planner knows of a server with that table, which has no `problem`.

    A head that it has not measured is taken to cost as much as its blocks, by bytes.
    """
    decode = _table(costs.decode)
    if costs.head is not None:
        head = _table(costs.head)
    else:
        share = model.head_bytes / model.block_bytes
        times = tuple((decode.at(rows, 0) * share,) for rows in decode.rows)
        head = TimeTable(decode.rows, (0,), times)
    return PeerProfile(
        peer=peer,
        device_bytes=costs.device_bytes,
        decode=decode,
        prefill=_table(costs.prefill),
        head=head,
        pass_s=costs.pass_s,
        workspace_bytes_per_row=WORKSPACE_ROWS_OF_HIDDEN * model.row_bytes,
        host_bytes=0,
        overlaps=False,
        streams_weights=False,
        price_per_hour=costs.price_per_hour,
        purchase=costs.purchase,
        watts=costs.watts or costs.measured_watts,
        kind=costs.hardware,
    )


def _table(grid: TimeGrid) -> TimeTable:
    return TimeTable(grid.rows, grid.contexts, grid.seconds)


@dataclass(slots=True, eq=False)
class _Known:
    """Round trips and rates as reported, NaN where they aren't: `[N + 1, N + 1]`."""

    rtt_s: Floats
    bytes_per_s: Floats


def _network(kept: Sequence[Seen]) -> tuple[Network, frozenset[tuple[int, int]]]:
    count = len(kept) + 1
    known = _known(kept)
    rtt, rate = known.rtt_s.copy(), known.bytes_per_s.copy()
    guessed: set[tuple[int, int]] = set()
    for source in range(count):
        for target in range(count):
            if source == target:
                rtt[source, target] = rate[source, target] = 0.0
                continue
            if math.isnan(rtt[source, target]):
                rtt[source, target] = _guessed_rtt(known, source, target)
                guessed.add((source, target))
            if math.isnan(rate[source, target]):
                rate[source, target] = _guessed_rate(known, source, target)
                guessed.add((source, target))
    return Network(rtt / 2, rate), frozenset(guessed)


def _known(kept: Sequence[Seen]) -> _Known:
    count = len(kept) + 1
    rtt, rate = np.full((count, count), np.nan), np.full((count, count), np.nan)
    places = {server.peer: index for index, server in enumerate(kept)}
    for source, server in enumerate(kept):
        if 0 < server.rtt_s <= LONGEST_RTT_S:
            rtt[source, -1] = rtt[-1, source] = server.rtt_s
        for link in server.links:
            target = _place(link, places)
            if target is None or target == source:
                continue
            if 0 < link.rtt_s <= LONGEST_RTT_S:
                rtt[source, target] = link.rtt_s
            if 0 < link.bytes_per_s <= FASTEST_BYTES_PER_S:
                rate[source, target] = link.bytes_per_s
    return _Known(rtt, rate)


def _place(link: LinkReport, places: Mapping[PeerId, int]) -> int | None:
    return places.get(link.peer)  # pyright: ignore[reportArgumentType]  # a peer id is a text


def _guessed_rtt(known: _Known, source: int, target: int) -> float:
    """The way back if that is known, else the mean of what both ends have to others."""
    back = known.rtt_s[target, source]
    if not math.isnan(back):
        return float(back)
    ends = [_values(known.rtt_s[end]) for end in (source, target)]
    typical = [median(values) for values in ends if values]
    if not typical:
        typical = _values(known.rtt_s.ravel())
    return sum(typical) / len(typical) if typical else UNKNOWN_RTT_S


def _guessed_rate(known: _Known, source: int, target: int) -> float:
    """The best that the one has sent at and the other has received at; the lesser of them."""
    ends = [_values(known.bytes_per_s[source]), _values(known.bytes_per_s[:, target])]
    best = [max(values) for values in ends if values]
    if best:
        return min(best)
    others = _values(known.bytes_per_s.ravel())
    return median(others) if others else UNKNOWN_BYTES_PER_S


def _values(row: Floats) -> list[float]:
    return [float(value) for value in row if not math.isnan(value)]
