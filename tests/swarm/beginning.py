"""What tests of kept prompts share: prompts that begin alike, and who holds what of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bloombee.protocol.messages import PREFIX_TOKENS
from tests.generation import prompt
from tests.swarm.disturbed import GREEDY, NEW
from tests.swarm.harness import eventually

if TYPE_CHECKING:
    from bloombee.client import DistributedModelForCausalLM
    from bloombee.server.stage import StageServer
    from tests.client_swarm import ClientSwarm

C = PREFIX_TOKENS
SHARED = prompt(1, 3 * C, 1)
LONG = 3 * C


def begins(count: int, *, more: int = 7, seed: int = 0) -> torch.Tensor:
    """`count` tokens that all prompts here share, then others."""
    return torch.cat((SHARED[:, :count], prompt(1, more, 100 + seed)), 1)


def longer(local: Any, ids: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The next turn's text: what was asked, the answer of `same`, and `more`."""
    return torch.cat((local.generate(ids, max_new_tokens=NEW, **GREEDY), more), 1)


def adopted(model: DistributedModelForCausalLM) -> list[int]:
    """How much of each prompt the newest session of a model began with."""
    assert model.traffic is not None
    return model.traffic.adopted


def saved(swarm: ClientSwarm) -> list[int]:
    return [stage.prefixes.tokens_saved for stage in swarm.stages]


def kept(swarm: ClientSwarm, *chunks: int) -> None:
    """Wait until the stages keep so many chunks."""

    async def are_kept() -> bool:
        return tuple(len(stage.prefixes.store) for stage in swarm.alive()) == chunks

    swarm.loop.run(eventually(are_kept, f"{chunks} chunks are kept"))
    for stage in swarm.alive():
        stage.prefixes.store.check()


def forget(swarm: ClientSwarm, stage: StageServer, chunks: int) -> None:
    """Let a stage lose the chunks that it kept last."""
    store = stage.prefixes.store

    def drop() -> None:
        store._drop(next(each for each in store._chunks.values() if not each.children))

    for _ in range(chunks):
        swarm.now(drop)
    store.check()
