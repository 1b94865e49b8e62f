"""Good orders of many peers, where trying all sets is too much.

The dynamic programme leaves out whom it doesn't need, so an order of all peers stands for
all its sub-orders. From a first order (nearest neighbours), rounds of: keep the peers that
are used in their order, put everybody else in where the detour is least, solve again. The
old route stays among the candidates, so no round makes it worse. With few used peers, exact
search over them and a few others at a time finishes the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.order_dp import Found, plan_order
from bloombee.planner.set_search import MOST_PEERS, search_sets, weights_of_sets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from bloombee.planner.costs import Costs
    from bloombee.planner.profiles import Floats
    from bloombee.planner.workload import Goal

    Ints = NDArray[np.int64]
    Order = tuple[int, ...]

MOST_FIRSTS = 3
MOST_STARTS = 3
MOST_ROUNDS = 6
POOL = 64
"""Peers that one search looks at; further ones are tried from other starts."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a search is for: seconds times the sum of the used peers' `weights`, if given.

    `thorough` matters beyond ten peers only: else just the seeds are improved, and briefly.
    """

    goal: Goal
    weights: Floats | None = None
    most_peers: int | None = None
    thorough: bool = True

    @property
    def price_factors(self) -> tuple[float, ...]:
        """How much dearer than they are peers are tried to be, so that fewer are used."""
        return (0.3, 1.0, 3.0, 10.0, 100.0) if self.thorough else (1.0, 10.0)

    def weighted(self, found: Found) -> Found:
        """`found` scored by seconds x weight instead of seconds; infinite with too many peers."""
        score = found.score_s
        if self.most_peers is not None and len(found.route) > self.most_peers:
            score = float("inf")
        elif self.weights is not None:
            score *= sum(float(self.weights[peer]) for peer, _ in found.route)
        return Found(found.route, found.cap_s, score)


def search_order(
    costs: Costs,
    terms: Terms,
    bound: float = float("inf"),
    *,
    seeds: Sequence[Order] = (),
) -> Found | None:
    """The best plan found over all orders: exact to ten peers, heuristic beyond.

    `seeds` are orders worth trying first (routes of other shapes). The score is weighted as
    `terms` say; None when none is below `bound`.
    """
    if costs.peers <= MOST_PEERS:
        return _exact(costs, terms, bound)
    starts = [*seeds] if seeds and not terms.thorough else [*seeds, *_starts(costs)]
    best: Found | None = None
    for start in starts:
        found = _improve(costs, terms, start, rounds=MOST_ROUNDS if terms.thorough else 1)
        if found is not None and found.score_s < min(bound, best.score_s if best else bound):
            best = found
    if best is not None and terms.thorough and len(best.route) < MOST_PEERS:
        best = _polish(costs, terms, best)
    return best


def _exact(costs: Costs, terms: Terms, bound: float) -> Found | None:
    weights = None if terms.weights is None else weights_of_sets(terms.weights)
    if terms.most_peers is not None:
        sizes = weights_of_sets(np.ones(costs.peers))
        allowed = np.where(sizes <= terms.most_peers, 1.0, np.inf)
        weights = allowed if weights is None else weights * allowed
    return search_sets(costs, terms.goal, weights, bound)


def _starts(costs: Costs) -> Iterator[Order]:
    """First orders: nearest neighbours from the peers that promise most."""
    ends = np.maximum(costs.enter_s.min(axis=(0, 1)), costs.leave_s.min(axis=(0, 1)))
    appeal = ends + _pace(costs)
    hops = costs.hop_s.min(axis=0)
    fits = np.isfinite(appeal).sum()
    for first in np.argsort(appeal, kind="stable")[: min(MOST_STARTS, fits)]:
        yield _chain(int(first), _pool(costs, int(first)), hops)


def _pace(costs: Costs) -> Floats:
    """Seconds that each peer takes for its fair share of all blocks, as well as it can."""
    with np.errstate(invalid="ignore"):
        per_block = costs.stage_s[0][:, 1:] / np.arange(1, costs.blocks + 1)
    return per_block.min(axis=1) * costs.blocks


def _pool(costs: Costs, first: int) -> Ints:
    """The peers that go best with `first`: quick, and not far."""
    far = costs.hop_s[:, first].min(axis=0) + costs.hop_s[:, :, first].min(axis=0)
    far[first] = 0.0
    appeal = far + _pace(costs)
    near = np.argsort(appeal, kind="stable")[:POOL]
    return near[np.isfinite(appeal[near])]


def _chain(first: int, peers: Ints, hops: Floats) -> Order:
    """Nearest neighbours from `first` on."""
    rest = [int(peer) for peer in peers if peer != first]
    order = [first]
    while rest:
        nearest = int(np.argmin(hops[order[-1], rest]))
        order.append(rest.pop(nearest))
    return tuple(order)


def _improve(costs: Costs, terms: Terms, order: Order, rounds: int) -> Found | None:
    """Solve, then again with everybody else put in where the detour is least."""
    hops = costs.hop_s.min(axis=0)
    pool = np.array(sorted({*order, *(int(peer) for peer in _pool(costs, order[0]))}))
    best = _solve(costs, terms, order) or _solve(costs, terms, _chain(order[0], pool, hops))
    for _ in range(rounds):
        if best is None:
            return None
        used = tuple(peer for peer, _ in best.route)
        orders = (_filled(used, pool, hops), _filled(_uncrossed(used, hops), pool, hops))
        tried = [_solve(costs, terms, candidate) for candidate in orders]
        better = min((f for f in (best, *tried) if f is not None), key=lambda f: f.score_s)
        if better.score_s >= best.score_s * (1 - 1e-9):
            return best
        best = better
    return best


def _solve(costs: Costs, terms: Terms, order: Order) -> Found | None:
    """The best plan of an order, on the terms; heuristic where peers have weights."""
    if costs.enter_s.shape[1] > 1:
        costs = costs.narrowed(np.array(order[:MOST_FIRSTS]))
    found = plan_order(costs, order, terms.goal)
    if found is None:
        return None
    best = terms.weighted(found)
    weights = np.ones(costs.peers) if np.isinf(best.score_s) else terms.weights
    if weights is not None:
        # Where seconds x weight is least, a little more weight costs seconds / weight.
        price = found.score_s / sum(float(weights[peer]) for peer, _ in found.route)
        for factor in terms.price_factors:
            lean = _penalised(costs, terms, order, weights * (price * factor))
            if lean is not None and lean.score_s < best.score_s:
                best = lean
    return None if np.isinf(best.score_s) else best


def _penalised(costs: Costs, terms: Terms, order: Order, penalty_s: Floats) -> Found | None:
    lean = plan_order(costs, order, terms.goal, penalty_s=penalty_s)
    if lean is None:
        return None
    alone = plan_order(costs, [peer for peer, _ in lean.route], terms.goal)
    return None if alone is None else terms.weighted(alone)


def _filled(used: Order, pool: Ints, hops: Floats) -> Order:
    """An order of all of `pool` that keeps that of `used`, each other where it detours least."""
    others = [int(peer) for peer in pool if int(peer) not in used]
    if not others:
        return used
    here, there, far = np.array(used), np.array([*used[1:], used[0]]), np.array(others)
    detours = hops[far[:, None], there] + hops[here[:, None], far].T
    if len(used) > 1:
        detours = detours - hops[here, there]
    slots = np.nan_to_num(detours, nan=np.inf).argmin(axis=1)
    order: list[int] = []
    for slot, peer in enumerate(used):
        guests = np.array([o for o, s in zip(others, slots, strict=True) if s == slot])
        order += _chain(peer, guests, hops)
    return tuple(order)


def _uncrossed(used: Order, hops: Floats) -> Order:
    """The same peers with stretches moved while that shortens the path (or-opt)."""
    order = list(used)
    for length in (1, 2, 3):
        for start in range(len(order) - length + 1):
            piece, rest = order[start : start + length], order[:start] + order[start + length :]
            tries = [rest[:i] + piece + rest[i:] for i in range(len(rest) + 1)]
            order = min(tries, key=lambda path: _length(path, hops))
    return tuple(order)


def _length(path: Sequence[int], hops: Floats) -> float:
    return float(hops[path[:-1], path[1:]].sum())


def _polish(costs: Costs, terms: Terms, best: Found) -> Found:
    """Exact search over the used peers and a few others at a time."""
    used = [peer for peer, _ in best.route]
    others = [int(peer) for peer in _pool(costs, used[0]) if int(peer) not in used]
    room = MOST_PEERS - len(used)
    for start in range(0, len(others), room):
        few = sorted({*(peer for peer, _ in best.route), *others[start : start + room]})
        found = _exact(costs.take(np.array(few)), _terms_of(terms, few), best.score_s)
        if found is not None and len(found.route) < MOST_PEERS:
            route = tuple((few[peer], blocks) for peer, blocks in found.route)
            best = Found(route, found.cap_s, found.score_s)
            room = max(1, MOST_PEERS - len(route))
    return best


def _terms_of(terms: Terms, few: Sequence[int]) -> Terms:
    weights = None if terms.weights is None else terms.weights[np.array(few)]
    return Terms(terms.goal, weights, terms.most_peers)
