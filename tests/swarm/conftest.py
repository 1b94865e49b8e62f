"""A tiny model, as transformers runs it and as a swarm of three stages does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bloombee.models import open_source
from tests.client_swarm import ClientSwarm, Size
from tests.swarm.beginning import LONG, begins, kept
from tests.swarm.disturbed import THREE, same
from tests.tiny import reference, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.models import ModelSource


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """The model that stages and clients load."""
    return open_source(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model in this process."""
    return reference(tiny_model("llama", tmp_path_factory.mktemp("local")))


@pytest.fixture
def three(source: ModelSource) -> Iterator[ClientSwarm]:
    """A swarm of three stages, none of them twice."""
    with ClientSwarm(source, THREE, Size(kv_tokens=4096)) as swarm:
        yield swarm


@pytest.fixture
def warm(three: ClientSwarm, local: Any) -> DistributedModelForCausalLM:
    """A client of `three` whose first session has left three chunks of its prompt on each stage."""
    model = three.model()
    same(local, model, begins(LONG), max_new_tokens=2)
    kept(three, 3, 3, 3)
    return model
