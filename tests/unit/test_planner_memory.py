"""Weights, KV and buffers fit exactly or not at all, and the quickest way of fitting is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import PeerId
from bloombee.planner.memory import Load, Memory, residence
from bloombee.planner.profiles import ModelFacts, PeerProfile, TimeTable
from bloombee.planner.workload import Head, Shape, Workload
from tests.planning import LLAMA_30B

MODEL = ModelFacts("tiny", 6, 8, 100, 50, 2, 8, 70, 90)
WORKLOAD = Workload(prompt_tokens=3, new_tokens=4, page_tokens=4)
PEER = PeerProfile(
    peer=PeerId("p"), device_bytes=0, decode=TimeTable.flat(1.0), prefill=TimeTable.flat(1.0)
)


def _naive(peer: PeerProfile, shape: Shape, ends: int, blocks: int) -> float:
    """Least transfer seconds over every number of streamed blocks and of pages on the host."""
    pages = -(-WORKLOAD.full_tokens // WORKLOAD.page_tokens)
    page = WORKLOAD.page_tokens * MODEL.kv_bytes_per_token
    wanted = blocks * shape.batch * pages
    rows = max(shape.micro_batch, shape.chunk_tokens)
    least = float("inf")
    for streamed in range(blocks + 1 if peer.streams_weights else 1):
        for away in range(wanted + 1):
            device = peer.workspace_bytes + peer.workspace_bytes_per_row * rows + ends
            device += (blocks - streamed + min(2, streamed)) * MODEL.block_bytes
            device += (wanted - away) * page
            device += min(2, blocks) * shape.micro_batch * pages * page if away else 0
            if device > peer.device_bytes or away * page > peer.host_bytes:
                continue
            least = min(least, _seconds(peer, shape, away * page, streamed))
            if not streamed and not away:
                return 0.0
    return least


def _seconds(peer: PeerProfile, shape: Shape, away_bytes: int, streamed: int) -> float:
    weights = streamed * MODEL.block_bytes
    from_disk = max(0, weights - (peer.host_bytes - away_bytes))
    if (away_bytes or weights) and not peer.host_device_bytes_per_s:
        return float("inf")
    if from_disk and not peer.disk_bytes_per_s:
        return float("inf")
    capacity = 8  # two pages of four tokens hold the seven of a sequence
    read = away_bytes * shape.micro_batch / shape.batch * WORKLOAD.usual_tokens / capacity
    bus = (read + weights) / peer.host_device_bytes_per_s if read + weights else 0.0
    return max(bus, from_disk / peer.disk_bytes_per_s if from_disk else 0.0)


peers = st.builds(
    replace,
    st.just(PEER),
    device_bytes=st.integers(0, 900),
    workspace_bytes=st.integers(0, 60),
    workspace_bytes_per_row=st.integers(0, 5),
    host_bytes=st.integers(0, 500),
    host_device_bytes_per_s=st.sampled_from([0.0, 10.0, 100.0]),
    disk_bytes_per_s=st.sampled_from([0.0, 5.0, 50.0]),
    streams_weights=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(
    machines=st.lists(peers, min_size=1, max_size=3),
    batch=st.integers(1, 3),
    micro=st.integers(1, 3),
    ends=st.sampled_from([0, 70, 160]),
)
def test_as_trying_every_split(
    machines: list[PeerProfile], batch: int, micro: int, ends: int
) -> None:
    shape = Shape(batch, min(micro, batch), 4, Head.CLIENT)
    load = Load.of(MODEL, WORKLOAD, shape)
    found = residence(MODEL, Memory.of(machines), load, ends)
    for index, peer in enumerate(machines):
        expected = [0.0] + [_naive(peer, shape, ends, n) for n in range(1, MODEL.blocks + 1)]
        assert found.transfer_s[index].tolist() == pytest.approx(expected)


def test_a_byte_too_few_is_too_few() -> None:
    shape = Shape(1, 1, 4, Head.CLIENT)
    load = Load.of(MODEL, WORKLOAD, shape)
    # Three blocks of 100 bytes, and two pages of 4 x 2 bytes for each.
    exact = 3 * 100 + 3 * 2 * 8
    machines = [replace(PEER, device_bytes=exact), replace(PEER, device_bytes=exact - 1)]
    found = residence(MODEL, Memory.of(machines), load, 0)
    assert np.isfinite(found.transfer_s).sum(axis=1).tolist() == [4, 3]


def test_papers_two_gpus_hold_llama_30b_only_with_kv_on_the_host() -> None:
    """Paper 8.3: 30 blocks on 32 GB, batch 32, nearly all KV in host memory."""
    gpu = replace(
        PEER,
        device_bytes=34_190_000_000,
        workspace_bytes=500_000_000,
        host_bytes=64 * 10**9,
        host_device_bytes_per_s=25e9,
    )
    workload = Workload()
    load = Load.of(LLAMA_30B, workload, Shape(32, 32, 512, Head.CLIENT))
    found = residence(LLAMA_30B, Memory.of([gpu]), load, 0)
    share = found.kv_pages[0, 30] * load.page_bytes / (30 * 32 * 256 * 26_624)
    assert found.transfer_s[0, 20] == 0
    assert 0.7 < share <= 1
    nothing = residence(LLAMA_30B, Memory.of([replace(gpu, host_bytes=0)]), load, 0)
    assert np.isinf(nothing.transfer_s[0, 30])
