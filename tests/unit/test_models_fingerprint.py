"""Two servers meet when config and weights are the same, and only then."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloombee.errors import ModelError
from bloombee.models import open_source
from bloombee.models.fingerprint import VOLATILE
from bloombee.models.hashing import sha256_of
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fingerprint(folder: Path) -> str:
    return open_source(str(folder)).fingerprint


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes, indent=7))


def test_a_moved_copy_saved_by_another_release_meets(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    other = tmp_path / "elsewhere"
    shutil.copytree(folder, other)
    edit_config(other, transformers_version="4.31.0", _name_or_path="x/y", torch_dtype="float16")
    assert fingerprint(folder) == fingerprint(other)
    assert len(fingerprint(folder)) == 40
    assert {"dtype", "transformers_version"} <= VOLATILE


def test_another_config_or_another_weight_never_meets(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    seen = {fingerprint(folder), fingerprint(tiny_model("llama", tmp_path, seed=1))}
    other = tmp_path / "config"
    shutil.copytree(folder, other)
    edit_config(other, rms_norm_eps=1e-4)
    seen.add(fingerprint(other))
    changed = tmp_path / "weight"
    shutil.copytree(folder, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][3] += torch.finfo(torch.float32).eps * 4
    save_file(tensors, changed / "model.safetensors")
    seen.add(fingerprint(changed))
    assert len(seen) == 4


def test_all_shards_count_also_those_of_other_servers(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, sharded=True)
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(ModelError, match="hub id"):
        _ = open_source(str(folder)).fingerprint


def test_hub_blobs_are_named_by_their_hash_and_not_read(tmp_path: Path) -> None:
    blob = tmp_path / ("ab" * 32)
    blob.write_bytes(b"whatever")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert sha256_of({"w": link}) == {"w": "ab" * 32}


def test_a_hash_is_kept_until_the_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloombee.models.hashing.KEPT_FROM_BYTES", 1)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = sha256_of({"w": file})
    (record,) = (cache / "bloombee" / "sha256").iterdir()
    record.write_text(record.read_text().replace(first["w"], "kept"))
    assert sha256_of({"w": file}) == {"w": "kept"}
    file.write_bytes(b"another")
    assert sha256_of({"w": file})["w"] not in ("kept", first["w"])


def test_a_broken_or_unwritable_cache_only_costs_time(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloombee.models.hashing.KEPT_FROM_BYTES", 1)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = sha256_of({"w": file})
    (record,) = (cache / "bloombee" / "sha256").iterdir()
    record.write_text("{")
    assert sha256_of({"w": file}) == first
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    assert sha256_of({"w": file}) == first
