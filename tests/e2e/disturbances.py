"""What recovery tests share: doing something at an exact token, and whose turn it is."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from bloombee import AutoDistributedModelForCausalLM
from tests.e2e.dht_processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bloombee.cli.local_swarm import LocalSwarm

MODEL = "smollm2"
SERVER_FLAGS = ("--dtype", "float32", "--threads", "1")
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
STAGES = {"first": 0, "middle": 1, "last": 2}
FREE_S = 5.0
"""For servers to let go of what a closed session held, on a busy machine."""


def prompt(columns: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(100, 49_000, (1, columns), generator=numbers)


class AtToken(LogitsProcessor):
    """Calls `happen` when the logits of the `number`-th new token have come, before the next step.

    `seen` counts them; `reached` is set then.
    """

    def __init__(self, number: int, happen: Callable[[], object] = lambda: None) -> None:
        self.seen = 0
        self.reached = threading.Event()
        self._number = number
        self._happen = happen

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == self._number:
            self._happen()
            self.reached.set()
        return scores

    @property
    def processors(self) -> LogitsProcessorList:
        return LogitsProcessorList([self])


@contextmanager
def client_of(swarm: LocalSwarm) -> Iterator[Any]:
    model = AutoDistributedModelForCausalLM.from_pretrained(
        MODEL, initial_peers=swarm.initial_peers, dtype="float32"
    )
    try:
        yield model
    finally:
        model.close()


def stages(swarm: LocalSwarm, model: Any) -> list[int]:
    """The servers of the model's route, in order."""
    return [swarm.index_of(stage.peer) for stage in model.route.stages]


def alive(swarm: LocalSwarm) -> list[int]:
    return [index for index in range(len(swarm.spans)) if swarm.server(index).is_running]


def revive(swarm: LocalSwarm) -> None:
    """Start all servers again that were killed."""
    dead = set(range(len(swarm.spans))) - set(alive(swarm))
    swarm.restart(*dead)


def wait_free(swarm: LocalSwarm, deadline_s: float = FREE_S) -> float:
    """Until no living server holds a session or a page; returns how long it took."""

    def free() -> bool:
        told = swarm.describe(*alive(swarm))
        return all(each.sessions == 0 and each.free_tokens == each.kv_tokens for each in told)

    return wait_until(free, deadline_s)
