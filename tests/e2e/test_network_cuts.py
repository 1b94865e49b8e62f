"""Links between hosts are cut: both ways, one way, and the client's own for ten seconds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from bloombee.cli.local_swarm import LocalSwarm
from tests.e2e.disturbances import (
    GREEDY,
    MODEL,
    SERVER_FLAGS,
    AtToken,
    client_of,
    prompt,
    stages,
    wait_free,
)
from tests.e2e.namespaces import Network, need_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SPANS = ("0:10", "10:20", "20:30", "10:20")
HOSTS = ("dht", "server0", "server1", "server2", "server3")
COLUMNS, NEW, AT = 40, 24, 8
OFFLINE_S = 10.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_namespaces()
    with Network(*HOSTS) as network:
        yield network


@pytest.fixture(scope="module")
def swarm(network: Network) -> Iterator[LocalSwarm]:
    places = [network.place(host) for host in HOSTS]
    with LocalSwarm(MODEL, SPANS, server_flags=SERVER_FLAGS, places=places) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: LocalSwarm) -> Iterator[Any]:
    with client_of(swarm) as model:
        yield model


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """The answer of a network without faults."""
    return model.generate(prompt(COLUMNS), max_new_tokens=NEW, **GREEDY).tolist()


def generate(model: Any, at: AtToken) -> list[list[int]]:
    arguments = {**GREEDY, "max_new_tokens": NEW, "logits_processor": at.processors}
    return model.generate(prompt(COLUMNS), **arguments).tolist()


def host(server: int) -> str:
    return f"server{server}"


def test_the_client_is_offline_for_ten_seconds(
    network: Network, swarm: LocalSwarm, model: Any, expected: list[list[int]]
) -> None:
    """Longer than silence counts as loss, shorter than the lease: nothing is computed again."""
    before: list[int] = []

    def cut() -> None:
        before.extend(stages(swarm, model))
        network.cut_here()

    at = AtToken(AT, cut)
    try:
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(generate, model, at)
            assert at.reached.wait(60.0)
            threading.Event().wait(OFFLINE_S)
            assert not going.done()
            network.mend_here()
            mended = time.monotonic()
            assert going.result(60.0) == expected
    finally:
        network.mend_here()
    assert time.monotonic() - mended < 15.0
    assert stages(swarm, model) == before
    assert model.traffic.replayed_tokens == 0
    wait_free(swarm)


def test_one_direction_between_two_stages_is_lost(
    network: Network, swarm: LocalSwarm, model: Any, expected: list[list[int]]
) -> None:
    """The client still hears all of them; the stage that can't push says so."""
    cut: list[str] = []
    muted: list[float] = []

    def mute() -> None:
        first, second, _ = stages(swarm, model)
        cut.extend((host(first), host(second)))
        network.mute(*cut)
        muted.append(time.monotonic())

    at = AtToken(AT, mute)
    try:
        assert generate(model, at) == expected
        # Silence counts as loss after 4 s; then one short dial of who was reached before.
        assert time.monotonic() - muted[0] < 10.0
        assert cut[1] not in [host(server) for server in stages(swarm, model)]
    finally:
        network.unmute(*cut)
    wait_free(swarm)


def test_the_middle_stage_is_cut_off(
    network: Network, swarm: LocalSwarm, model: Any, expected: list[list[int]]
) -> None:
    cut: list[str] = []

    def cut_off() -> None:
        cut.append(host(stages(swarm, model)[1]))
        network.cut(cut[0])

    at = AtToken(AT, cut_off)
    try:
        assert generate(model, at) == expected
        assert cut[0] not in [host(server) for server in stages(swarm, model)]
    finally:
        network.mend(*cut)
    wait_free(swarm, 40.0)  # the one that was cut off frees when the client's lease is over
