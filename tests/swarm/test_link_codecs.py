"""Rows are coded where the link is slow, and only then; the tokens are those of one machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bloombee.protocol.messages import Describe, LinkReport
from bloombee.telemetry import now_us
from bloombee.transport.links import LinkShape
from tests.client_swarm import QUICK, ClientSwarm, Size
from tests.swarm.disturbed import THREE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bloombee.models import ModelSource

FAST = LinkShape(delay_s=0.006)
SLOW = LinkShape(delay_s=0.006, bytes_per_s=2e5)
ROWS = 32


@pytest.fixture
def auto(source: ModelSource) -> Iterator[ClientSwarm]:
    with ClientSwarm(source, THREE, Size(kv_tokens=8192, codec="auto")) as swarm:
        yield swarm


def report(swarm: ClientSwarm, stage: int, peer: str) -> LinkReport:
    """What a stage says of its link to `peer`."""
    said = swarm.loop.run(swarm.stages[stage].describe(Describe(topics=("links",))))
    return next(link for link in said.links if link.peer == peer)


def prompts() -> torch.Tensor:
    return torch.arange(ROWS * 4).reshape(ROWS, 4) % 90 + 3


def check(local: Any, model: Any, new_tokens: int, **settings: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    expected = local.generate(prompts(), **asked)
    assert torch.equal(model.generate(prompts(), **asked, **settings), expected)


def until(auto: ClientSwarm, local: Any, model: Any, codec: str) -> LinkReport:
    """Generate until the first stage sends rows on in that way; a busy machine takes longer."""
    tries = 0
    while True:
        check(local, model, 24)
        found = report(auto, 0, auto.stages[1].endpoint.peer)
        tries += 1
        if found.codec == codec or tries == 20:
            return found


@pytest.mark.timeout(60)
def test_the_codec_follows_the_link(
    auto: ClientSwarm, local: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = auto.model(QUICK.model_copy(update={"micro_batches": 1}))
    first, second = (stage.endpoint.peer for stage in auto.stages[:2])
    auto.network.shape(first, second, FAST)
    assert until(auto, local, model, "raw").codec == "raw"
    auto.network.shape(first, second, SLOW)
    slow = until(auto, local, model, "split")
    assert slow.codec == "split"
    assert slow.bytes_per_s == pytest.approx(SLOW.bytes_per_s, rel=0.5)
    assert slow.samples > 5
    assert slow.rtt_s > 0.004
    assert abs(slow.offset_s) < 0.05
    auto.network.shape(first, second, FAST)
    assert until(auto, local, model, "raw").codec == "raw"
    changes = [r.getMessage() for r in caplog.records if " rows to " in r.getMessage()]
    decode = [change for change in changes if change.startswith("decode")]
    to_second = ["go split" in change for change in decode if second[-8:] in change]
    assert to_second[-2:] == [True, False], changes


def test_rows_are_cut_only_for_clients_that_agree(source: ModelSource, local: Any) -> None:
    with ClientSwarm(source, THREE, Size(kv_tokens=8192, codec="lossy-int8")) as swarm:
        expected = local(prompts()).logits
        exact = swarm.model(QUICK)(prompts()).logits
        cut = swarm.model(QUICK.model_copy(update={"lossless": False}))(prompts()).logits
        check(local, swarm.model(QUICK), 8)
    torch.testing.assert_close(exact, expected)
    assert not torch.allclose(cut, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cut, expected, rtol=0.1, atol=0.1)


@pytest.mark.timeout(60)
def test_rows_to_and_from_the_client_are_coded_too(auto: ClientSwarm, local: Any) -> None:
    model = auto.model(QUICK.model_copy(update={"codec": "auto"}))
    here, first, last = auto.clients[0], auto.stages[0].endpoint.peer, auto.stages[2].endpoint.peer
    auto.network.shape(here, first, SLOW)
    auto.network.shape(last, here, SLOW)
    check(local, model, 30, head="client")
    back = report(auto, 2, here)
    assert back.codec == "split"
    assert back.bytes_per_s == pytest.approx(SLOW.bytes_per_s, rel=0.5)
    rows = local.get_input_embeddings()(prompts()).detach()  # not ids
    for _ in range(4):
        model.generate(inputs_embeds=rows, max_new_tokens=1, do_sample=False)
    out = next(link for link in model.access.neighbours.reports(now_us()) if link.peer == first)
    assert (out.codec, out.bytes_per_s) == ("split", pytest.approx(SLOW.bytes_per_s, rel=0.5))
