"""Servers and clients die, freeze and come back: the tokens are those of an undisturbed run.

Real processes, sockets and DHT. Every block is held twice, the middle by a spare with other
cut points. A test that kills one holder of a stage leaves it dead when the next test can do
without; `held_twice` starts all dead ones again when it can't.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from bloombee.cli.local_swarm import LocalSwarm
from bloombee.core import Span
from tests.e2e.dht_processes import ROOT, wait_until
from tests.e2e.disturbances import (
    GREEDY,
    MODEL,
    SERVER_FLAGS,
    STAGES,
    AtToken,
    alive,
    client_of,
    prompt,
    revive,
    stages,
    wait_free,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SPANS = ("0:10", "10:20", "20:30", "0:10", "5:25", "20:30")
PARTS = (Span(0, 10), Span(10, 20), Span(20, 30))
SHORT, LONG = 40, 1500
"""Tokens of a prompt: sent in one step, and in six."""
NEW = 24
AT = 8
FREED_S = 1.0
"""A vanished client's pages are free within a second."""

Arguments = dict[str, Any]
BEAMS: Arguments = {**GREEDY, "num_beams": 3}
SAMPLING: Arguments = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None, "seed": 5}


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    with LocalSwarm(MODEL, SPANS, server_flags=SERVER_FLAGS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: LocalSwarm) -> Iterator[Any]:
    with client_of(swarm) as model:
        yield model


@pytest.fixture(scope="module")
def undisturbed(swarm: LocalSwarm, model: Any) -> Callable[..., list[list[int]]]:
    """What the swarm answers when nothing happens to it; asked before anything does."""

    @cache
    def answer(columns: int, new: int, kind: str = "greedy") -> list[list[int]]:
        found = model.generate(prompt(columns), max_new_tokens=new, **KINDS[kind])
        assert found.shape == (1, columns + new)
        return found.tolist()

    return answer


KINDS = {"greedy": GREEDY, "beams": BEAMS, "sampling": SAMPLING}


def held_twice(swarm: LocalSwarm, *parts: Span) -> None:
    """Start what was killed when a block of these parts has a single holder."""
    spans = [Span.parse(swarm.spans[index]) for index in alive(swarm)]
    blocks = {block for part in parts for block in range(part.start, part.end)}
    if any(sum(block in span for span in spans) < 2 for block in blocks):
        revive(swarm)


# A server dies --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_killed_between_two_tokens(
    swarm: LocalSwarm, model: Any, undisturbed: Any, stage: str
) -> None:
    expected = undisturbed(SHORT, NEW)
    held_twice(swarm, PARTS[STAGES[stage]])
    victims: list[int] = []

    def kill() -> None:
        victims.append(stages(swarm, model)[STAGES[stage]])
        swarm.kill(victims[0])

    at = AtToken(AT, kill)
    found = model.generate(
        prompt(SHORT), max_new_tokens=NEW, logits_processor=at.processors, **GREEDY
    )
    assert found.tolist() == expected
    assert victims and victims[0] not in stages(swarm, model)
    wait_free(swarm)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_in_a_prompt(swarm: LocalSwarm, model: Any, undisturbed: Any, stage: str) -> None:
    """When it has computed a part of the prompt, and before the first token."""
    expected = undisturbed(LONG, 4)
    held_twice(swarm, PARTS[STAGES[stage]])
    before = {each.peer: each.steps for each in swarm.describe(*alive(swarm))}
    at = AtToken(0)
    tokens_before: list[int] = []

    def at_work() -> list[int]:
        """Servers that have computed a step by now, in order of the blocks they do."""
        told = swarm.describe(*alive(swarm))
        busy = [each for each in told if each.steps > before[each.peer]]
        return [swarm.index_of(each.peer) for each in sorted(busy, key=lambda each: each.start)]

    def kill_when_begun() -> None:
        wait_until(lambda: len(at_work()) > STAGES[stage], 60.0)
        swarm.kill(at_work()[STAGES[stage]])
        tokens_before.append(at.seen)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_when_begun)
        found = model.generate(
            prompt(LONG), max_new_tokens=4, logits_processor=at.processors, **GREEDY
        )
        killing.result()
    assert found.tolist() == expected
    assert tokens_before == [0]
    wait_free(swarm)


@pytest.mark.parametrize("kind", ["beams", "sampling"])
def test_two_killed_at_once(swarm: LocalSwarm, model: Any, undisturbed: Any, kind: str) -> None:
    """The first stage and the last, then what took the place of the first: three recoveries."""
    expected = undisturbed(SHORT, NEW, kind)
    revive(swarm)

    def kill() -> None:
        first, _, last = stages(swarm, model)
        swarm.kill(first)
        swarm.kill(last)

    at = AtToken(AT, kill)
    found = model.generate(
        prompt(SHORT), max_new_tokens=NEW, logits_processor=at.processors, **KINDS[kind]
    )
    assert found.tolist() == expected
    wait_free(swarm)


def test_frozen(swarm: LocalSwarm, model: Any, undisturbed: Any) -> None:
    """Its connections stand and its kernel answers, but no byte comes from it any more."""
    expected = undisturbed(SHORT, NEW)
    held_twice(swarm, PARTS[1])
    victims: list[int] = []

    def freeze() -> None:
        victims.append(stages(swarm, model)[1])
        swarm.freeze(victims[0])

    at = AtToken(AT, freeze)
    try:
        found = model.generate(
            prompt(SHORT), max_new_tokens=NEW, logits_processor=at.processors, **GREEDY
        )
    finally:
        for victim in victims:
            swarm.thaw(victim)
    assert found.tolist() == expected
    assert victims[0] not in stages(swarm, model)
    wait_free(swarm)  # the one that woke up included


def test_the_only_holder_comes_back(
    swarm: LocalSwarm, model: Any, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The session waits, says for what, and goes on with a server that has nothing of it."""
    expected = undisturbed(SHORT, NEW)
    revive(swarm)
    caplog.set_level(logging.WARNING, "bloombee")

    def kill_both() -> None:
        only = stages(swarm, model)[1]
        swarm.kill(only)
        swarm.kill({1: 4, 4: 1}[only])

    at = AtToken(AT, kill_both)
    arguments = {**GREEDY, "max_new_tokens": NEW, "logits_processor": at.processors}
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(model.generate, prompt(SHORT), **arguments)
        # Children end with the thread that starts them, so this one restarts.
        wait_until(at.reached.is_set, 60.0)
        wait_until(lambda: "waiting up to" in caplog.text, 20.0)
        assert not going.done()
        swarm.restart(1)
        found = going.result(60.0)
    assert found.tolist() == expected
    waiting = [line for line in caplog.messages if "waiting up to" in line]
    assert "10:20" in waiting[0]
    wait_free(swarm)


# The client dies ------------------------------------------------------------------------------

CLIENT = """
import sys, torch
from bloombee import AutoDistributedModelForCausalLM
torch.set_num_threads(1)
model = AutoDistributedModelForCausalLM.from_pretrained(
    "smollm2", initial_peers=sys.argv[1:], dtype="float32"
)
class Count:
    def put(self, value): print("token", flush=True)
    def end(self): pass
ids = torch.arange(100, 140)[None]
model.generate(ids, max_new_tokens=2000, streamer=Count(), do_sample=False, eos_token_id=None)
"""


def test_a_killed_client_holds_nothing(swarm: LocalSwarm, model: Any) -> None:
    held_twice(swarm, *PARTS)
    swarm.describe(*alive(swarm))  # connect before the time counts
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *swarm.initial_peers],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            assert client.stdout is not None
            for _ in range(6):
                assert client.stdout.readline() == "token\n"
            assert sum(each.sessions for each in swarm.describe(*alive(swarm))) == 3
        finally:
            client.kill()
        assert wait_free(swarm) < FREED_S
