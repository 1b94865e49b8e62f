"""Max-flow through nodes of limited capacity, by shortest augmenting paths (Edmonds and Karp)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Residual = list[dict[int, float]]

LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Flow:
    """The value of a flow, and the paths of nodes that carry it with how much each."""

    value: float
    paths: tuple[tuple[tuple[int, ...], float], ...]


def max_flow(through: Sequence[float], edges: Mapping[tuple[int, int], float]) -> Flow:
    """Most flow from node N (source) to node N + 1 (sink) through nodes of these capacities."""
    count = len(through)
    source, sink = 2 * count, 2 * count + 1
    residual: Residual = [{} for _ in range(2 * count + 2)]
    # Node i is split: it is entered at 2 i and left at 2 i + 1.
    capacity: dict[tuple[int, int], float] = {
        (2 * i, 2 * i + 1): limit for i, limit in enumerate(through)
    }
    for (i, j), limit in edges.items():
        here = source if i == count else 2 * i + 1
        capacity[here, sink if j == count + 1 else 2 * j] = limit
    for (i, j), limit in capacity.items():
        residual[i][j] = limit
        residual[j].setdefault(i, 0.0)
    while (path := _path(residual, source, sink)) is not None:
        pushed = min(residual[i][j] for i, j in path)
        for i, j in path:
            residual[i][j] -= pushed
            residual[j][i] += pushed
    used: Residual = [
        {j: flow for j in ways if (flow := residual[j].get(i, 0.0)) > LEAST and (i, j) in capacity}
        for i, ways in enumerate(residual)
    ]
    paths = _decompose(used, source, sink)
    return Flow(sum(value for _, value in paths), tuple(paths))


def _path(residual: Residual, source: int, sink: int) -> list[tuple[int, int]] | None:
    """A shortest path with room on every edge."""
    before = {source: source}
    waiting = deque([source])
    while waiting:
        here = waiting.popleft()
        for there, room in residual[here].items():
            if room > LEAST and there not in before:
                before[there] = here
                if there == sink:
                    return _edges(before, source, sink)
                waiting.append(there)
    return None


def _edges(before: Mapping[int, int], source: int, sink: int) -> list[tuple[int, int]]:
    edges: list[tuple[int, int]] = []
    here = sink
    while here != source:
        edges.append((before[here], here))
        here = before[here]
    return edges[::-1]


def _decompose(used: Residual, source: int, sink: int) -> list[tuple[tuple[int, ...], float]]:
    """The flow as paths: follow what flows, take the least of it away, again."""
    paths: list[tuple[tuple[int, ...], float]] = []
    while (path := _path(used, source, sink)) is not None:
        value = min(used[i][j] for i, j in path)
        for i, j in path:
            used[i][j] -= value
        paths.append((tuple(j // 2 for _, j in path if j != sink and j % 2 == 0), value))
    return paths
