"""More clients than the servers have room for: all are served, in turn; who won't wait is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.cli.local_swarm import LocalSwarm
from bloombee.client.auto import LocalShare
from bloombee.config.client import ClientSettings
from bloombee.errors import KVFull
from bloombee.models import open_source
from tests.e2e.disturbances import GREEDY, MODEL, SERVER_FLAGS, prompt, wait_free

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CLIENTS = 10
COLUMNS, NEW = 30, 20
ROOM = 2
"""Requests of a page each that fit at a time."""
PAGE_TOKENS = 64
PATIENT = ClientSettings(queue_s=60.0)
HASTY = ClientSettings(queue_s=0.5)


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    # Two stages, so that clients could hold one each and wait for the other's.
    flags = (*SERVER_FLAGS, "--kv-tokens", str(ROOM * PAGE_TOKENS), "--park-idle-s", "100")
    with LocalSwarm(MODEL, ("0:15", "15:30"), server_flags=flags) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def share() -> LocalShare:
    return LocalShare.load(open_source(MODEL), torch.float32, "cpu")


def test_ten_wait_and_one_does_not(swarm: LocalSwarm, share: LocalShare) -> None:
    peers = tuple(swarm.initial_peers)
    with ExitStack() as stack:

        def join(settings: ClientSettings) -> Any:
            model = share.join(peers, settings=settings)
            stack.callback(model.close)
            return model

        def ask(model: Any, seed: int) -> list[list[int]]:
            arguments = {**GREEDY, "max_new_tokens": NEW}
            return model.generate(prompt(COLUMNS, seed), **arguments).tolist()

        first, hasty, *waiting = [join(PATIENT), join(HASTY), *(join(PATIENT) for _ in range(10))]
        expected = [ask(first, seed) for seed in range(CLIENTS)]
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        with first.inference_session(max_length=ROOM * PAGE_TOKENS):
            first(prompt(3))
            assert [each.free_tokens for each in swarm.describe()] == [0, 0]
            answers = [pool.submit(ask, model, seed) for seed, model in enumerate(waiting)]
            with pytest.raises(KVFull, match=r"\b0 tokens free, \d+ asked for.*waited 0\.\d s"):
                ask(hasty, 0)
            assert not any(answer.done() for answer in answers)
        assert [answer.result(120.0) for answer in answers] == expected
        assert ask(hasty, 1) == expected[1]
        wait_free(swarm)
