"""Cluster files: every one that comes along is planned with, and mistakes are told in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bloombee.config.clusters import codecs, devices, model_sizes, read_cluster
from bloombee.config.files import config_path
from bloombee.errors import SettingsError
from bloombee.planner.clusters import Tables, build, model_facts
from bloombee.planner.roofline import Silicon, decode_table, prefill_table

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(config_path("clusters").glob("*.yaml"))
GOOD = """
machines:
  - {name: a, device: t4, count: 2, region: x, up_mbps: 20, down_mbps: 100, rtt_ms: 10}
  - {name: b, device: l4, region: y, up_mbps: 50, down_mbps: 200, rtt_ms: 30}
client: {region: x, up_mbps: 40, down_mbps: 80, rtt_ms: 20}
links:
  - {from: a, to: a, mbps: 1000, rtt_ms: 1}
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_makes_a_cluster(path: Path) -> None:
    file = read_cluster(path)
    model = model_facts("llama-30b", model_sizes()["llama-30b"])
    cluster = build(file, model, Tables(devices(), codecs()))
    assert len(cluster.peers) == sum(machine.count for machine in file.machines)
    off_diagonal = ~np.eye(len(cluster.network), dtype=bool)
    assert (cluster.network.bytes_per_s[off_diagonal] > 0).all()
    assert file.about


def test_helix_clusters_have_its_machines() -> None:
    counts = {
        path.stem: sum(machine.count for machine in read_cluster(path).machines)
        for path in FILES
        if path.stem.startswith("helix")
    }
    assert counts == {"helix-single": 24, "helix-regions": 24, "helix-42": 42}


def test_sizes_of_well_known_models() -> None:
    """Against their published parameter counts, blocks and ends together."""
    for name, billions in [("llama-7b", 6.74), ("llama-30b", 32.5), ("llama-2-70b", 68.98),
                           ("llama-3.1-8b", 8.03), ("smollm2", 0.1345)]:  # fmt: skip
        sizes = model_sizes()[name]
        facts = model_facts(name, sizes)
        ends = facts.both_ends_bytes // 2
        total = facts.blocks * facts.block_parameters + ends + sizes.hidden
        assert total / 1e9 == pytest.approx(billions, rel=0.002), name
    assert model_facts("x", model_sizes()["llama-30b"]).kv_bytes_per_token == 26_624


def test_roofline_by_hand() -> None:
    model = model_facts("llama-30b", model_sizes()["llama-30b"])
    silicon = Silicon(1e12, 1e14, 0.5, 0.5)
    decode, prefill = decode_table(model, silicon), prefill_table(model, silicon)
    assert decode.at(1, 0) == pytest.approx(model.block_bytes / 0.5e12)
    read = model.block_bytes + 32 * 512 * 26_624
    assert decode.at(32, 512) == pytest.approx(read / 0.5e12)
    operations = 2048 * (2 * model.block_parameters + 4 * 512 * 6656)
    assert prefill.at(2048, 512) == pytest.approx(operations / 0.5e14)


def test_links_and_access(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD)
    model = model_facts("llama-7b", model_sizes()["llama-7b"])
    network = build(read_cluster(path), model, Tables(devices(), codecs())).network
    mbps = network.bytes_per_s * 8 / 1e6
    # a-1, a-2, b, client: upload here, download there; the named link, within the access.
    assert mbps[0, 2] == 20
    assert mbps[2, 0] == 50
    assert mbps[0, 1] == 20
    assert mbps[2, 3] == 50
    assert mbps[3, 2] == 40
    assert network.latency_s[0, 2] == pytest.approx(0.020)
    assert network.latency_s[0, 1] == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("machines:", "machine:", ": unknown key machine; did you mean machines?"),
        (
            "device: t4",
            "device: t4x",
            ": machines: a: device: 't4x' is not known; did you",
        ),
        ("count: 2", "count: 0", ": machines[0].count: should be greater than 0, got 0"),
        ("count: 2", "cuont: 2", ": machines[0]: unknown key cuont; did you mean count?"),
        ("name: b, ", "", ": machines[1].name is required"),
        ("name: b", "name: a", ": two machines are called 'a'; use count, or other names"),
        ("from: a", "from: q", ": links name 'q', no machine or region"),
        ("mbps: 1000", "mbps: fast", ": links[0].mbps: should be a valid number, got 'fast'"),
        ("rtt_ms: 1}", "rtt_ms: 1}\ncodecs: [zip]", ": codecs: 'zip' is not known"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SettingsError) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(caught.value)


def test_a_cluster_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("machines: []")
    with pytest.raises(SettingsError) as caught:
        read_cluster(path)
    assert str(caught.value) == f"{path}: machines lists 0: list at least 1"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        read_cluster(tmp_path / "none.yaml")
