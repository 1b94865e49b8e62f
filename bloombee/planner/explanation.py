"""Why there is no plan: the constraint that fails, found by relaxing them one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bloombee.planner.costs import MIDDLE, Focus, price
from bloombee.planner.order_search import Terms, search_order
from bloombee.planner.plan import Constraint, Infeasible
from bloombee.planner.workload import Goal, Head, Shape

if TYPE_CHECKING:
    from bloombee.planner.costs import Costs
    from bloombee.planner.planning import Problem

SHOWN_PEERS = 4


def explain(problem: Problem) -> Infeasible:
    """The first constraint that even the least demanding shape fails, in one line."""
    model, cluster = problem.model, problem.cluster
    if not cluster.peers:
        return Infeasible(Constraint.NO_PEERS, "the cluster has no peers: add machines to it")
    shape = _least(problem)
    costs = price(model, cluster, problem.workload, shape, Focus.DECODE).costs
    room = _room(costs)
    if sum(room) < model.blocks:
        return _too_little_memory(problem, shape, room)
    terms = Terms(Goal.SUM)
    linked = search_order(_fully_linked(costs), terms)
    if linked is None:
        return Infeasible(
            Constraint.DEVICE_MEMORY,
            f"the blocks fit, but no peer has room for embedding or head beside its blocks: "
            f"plan with the head at the client, or free {_gb(_ends_bytes(problem))} on one peer",
        )
    if search_order(costs, terms) is None:
        return Infeasible(Constraint.LINKS, _missing_links(problem, costs))
    return Infeasible(
        Constraint.MOST_PEERS,
        f"{model.name} needs more than {problem.most_peers} of these peers: "
        f"allow {_fewest(room, model.blocks)} or more",
    )


def _least(problem: Problem) -> Shape:
    """The shape that asks for least memory."""
    workload = problem.workload
    batch = min(workload.batches)
    head = Head.CLIENT if Head.CLIENT in workload.heads else workload.heads[0]
    chunk = min(*workload.chunk_tokens, batch * workload.prompt_tokens)
    return Shape(batch, min(workload.micro_batches_of(batch)), chunk, head)


def _room(costs: Costs) -> list[int]:
    """The longest span that fits on each peer."""
    fits = np.isfinite(costs.stage_s[MIDDLE])
    return [int(line.nonzero()[0].max()) if line.any() else 0 for line in fits]


def _fewest(room: list[int], blocks: int) -> int:
    """How many of the roomiest peers hold all blocks."""
    held = 0
    for count, most in enumerate(sorted(room, reverse=True), 1):
        held += most
        if held >= blocks:
            return count
    return len(room)


def _too_little_memory(problem: Problem, shape: Shape, room: list[int]) -> Infeasible:
    model, workload = problem.model, problem.workload
    bare = replace(workload, prompt_tokens=1, new_tokens=1, page_tokens=1)
    slim = Shape(1, 1, 1, shape.head)
    costs = price(model, problem.cluster, bare, slim, Focus.DECODE).costs
    weights_only = _room(costs)
    held, listed = sum(room), _listed(problem, room)
    if sum(weights_only) >= model.blocks:
        tokens = shape.batch * workload.full_tokens
        return Infeasible(
            Constraint.KV_MEMORY,
            f"with {tokens:,} tokens of KV ({shape.batch} x {workload.full_tokens}) the peers "
            f"hold {held} of {model.blocks} blocks ({listed}): ask for a smaller batch or "
            f"shorter sequences, or give peers host memory for KV",
        )
    missing = (model.blocks - sum(weights_only)) * model.block_bytes
    return Infeasible(
        Constraint.DEVICE_MEMORY,
        f"the peers hold {sum(weights_only)} of {model.blocks} blocks "
        f"({_listed(problem, weights_only)}) of {_gb(model.block_bytes)} each: add peers with "
        f"{_gb(missing)} more, or give peers host memory to stream weights from",
    )


def _listed(problem: Problem, room: list[int]) -> str:
    """The most capable peers with what they hold."""
    ranked = sorted(zip(problem.cluster.peers, room, strict=True), key=lambda pair: -pair[1])
    shown = ", ".join(f"{peer.peer} {blocks}" for peer, blocks in ranked[:SHOWN_PEERS])
    return shown + (", ..." if len(ranked) > SHOWN_PEERS else "")


def _fully_linked(costs: Costs) -> Costs:
    """The same costs with every link there, for nothing."""

    def free(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> object:
        return np.zeros_like(seconds)

    names = ("hop_s", "hop_busy_s", "enter_s", "enter_busy_s", "leave_s", "leave_busy_s")
    return replace(costs, **{name: free(getattr(costs, name)) for name in names})


def _missing_links(problem: Problem, costs: Costs) -> str:
    hops = costs.hop_s.min(axis=0)
    np.fill_diagonal(hops, 0.0)
    lonely = [
        str(peer.peer)
        for index, peer in enumerate(problem.cluster.peers)
        if np.isinf(hops[index]).sum() == len(hops) - 1
    ]
    if not np.isfinite(costs.enter_s).any() or not np.isfinite(costs.leave_s).any():
        return "no peer has a link from and to the client: give the client a rate"
    named = f" ({', '.join(lonely[:SHOWN_PEERS])} can reach no other)" if lonely else ""
    return (
        "the peers that have memory for all blocks aren't linked in one chain"
        f"{named}: give the missing links a rate"
    )


def _ends_bytes(problem: Problem) -> int:
    return max(problem.model.embed_bytes, problem.model.head_bytes)


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
