"""A tiny Llama beside a swarm of two stages that serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bloombee.core import Span
from bloombee.models import open_source
from tests.client_swarm import ClientSwarm
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from bloombee.client import DistributedModelForCausalLM


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ClientSwarm]]:
    path = tiny_model("llama", tmp_path_factory.mktemp("llama"))
    spans = [Span.parse(text) for text in ("0:3", "3:5")]
    with ClientSwarm(open_source(str(path)), spans) as swarm:
        yield reference(path), swarm


@pytest.fixture
def local(llama: tuple[PreTrainedModel, ClientSwarm]) -> PreTrainedModel:
    return llama[0]


@pytest.fixture
def swarm(llama: tuple[PreTrainedModel, ClientSwarm]) -> Iterator[ClientSwarm]:
    swarm = llama[1]
    free = swarm.free_tokens()
    yield swarm
    assert swarm.free_tokens() == free, "a test left KV on the servers"


@pytest.fixture
def remote(swarm: ClientSwarm) -> DistributedModelForCausalLM:
    return swarm.model()
