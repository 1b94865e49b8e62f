"""The hub as a folder behind a fake download: only what is needed comes, errors are one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx2
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from bloombee.core import Span
from bloombee.errors import ModelError
from bloombee.models import ModelSource, SpanModel, hub, open_source
from tests.tiny import BLOCKS, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

REPO = "owner/tiny"
COMMIT = "c" * 40


class FakeHub:
    """Serves one folder as one repository; counts what was asked of it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.snapshot = folder, cache / "snapshots" / COMMIT
        self.asked = 0
        self.error: Exception | None = None

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], **_: object
    ) -> str:
        assert repo == REPO
        assert revision in (None, "main", COMMIT)
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, self.snapshot)
        return str(self.snapshot)

    def model_info(self, repo: str, *, revision: str, files_metadata: bool) -> SimpleNamespace:
        assert (repo, revision, files_metadata) == (REPO, COMMIT, True)
        self.asked += 1
        return SimpleNamespace(siblings=[self._entry(file) for file in self.folder.iterdir()])

    def _entry(self, file: Path) -> SimpleNamespace:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        large = file.suffix == ".safetensors"
        lfs = SimpleNamespace(sha256=digest) if large else None
        return SimpleNamespace(rfilename=file.name, lfs=lfs)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path, sharded=True)


@pytest.fixture
def fake(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(local, tmp_path / "hub")
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def load(source: ModelSource, span: Span) -> SpanModel:
    return SpanModel.load(source, span, dtype=torch.float32, device="cpu", progress=False)


def test_only_the_spans_shards_are_downloaded(fake: FakeHub) -> None:
    source = open_source(REPO, revision="main")
    assert not list(fake.snapshot.glob("*.safetensors"))
    load(source, Span(1, 2))
    weights = json.loads((fake.folder / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {file for name, file in weights.items() if "layers.1." in name}
    assert {file.name for file in fake.snapshot.glob("*.safetensors")} == wanted
    assert len(wanted) < len(set(weights.values()))
    asked = fake.asked
    load(source, Span(1, 2))
    assert fake.asked == asked


def test_a_hub_id_and_a_path_of_the_same_files_meet(fake: FakeHub, local: Path) -> None:
    here = open_source(str(local)).fingerprint
    nothing_fetched = open_source(REPO)
    assert nothing_fetched.fingerprint == here
    load(nothing_fetched, Span(0, 1))
    assert open_source(REPO).fingerprint == here
    load(nothing_fetched, Span(0, BLOCKS))
    assert open_source(REPO).fingerprint == here


def test_hashes_of_files_that_are_not_here_are_remembered(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_source(REPO).fingerprint
    monkeypatch.setattr(hub, "HfApi", None)
    assert open_source(REPO).fingerprint == first


def test_a_repository_with_pickles_only_is_refused(fake: FakeHub, tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, seed=1)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fake.folder = folder
    with pytest.raises(ModelError, match="pickled"):
        load(open_source(REPO), Span(0, 1))


def test_a_shard_that_does_not_arrive_is_named(fake: FakeHub) -> None:
    source = open_source(REPO)
    lost = next(iter(fake.folder.glob("*.safetensors")))
    lost.unlink()
    with pytest.raises(ModelError, match=f"{lost.name} could not be downloaded"):
        load(source, Span(0, BLOCKS))


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://example.org"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RepositoryNotFoundError("404", response=response(404)), "check the spelling"),
        (GatedRepoError("403", response=response(403)), "accept its licence"),
        (RevisionNotFoundError("404", response=response(404)), "no such revision"),
        (LocalEntryNotFoundError("nothing\ncached"), "hub can't be reached"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (httpx2.ConnectError("no\nroute"), "check the network"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_hub_trouble_is_one_line_with_the_mend(
    fake: FakeHub, error: Exception, message: str
) -> None:
    fake.error = error
    with pytest.raises(ModelError, match=message) as caught:
        open_source(REPO)
    assert REPO in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_and_not_cached(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="owner/none is not on this machine") as caught:
        open_source("owner/none", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_cached_snapshot_serves_offline(local: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(local, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    source = open_source(REPO, cache_dir=tmp_path / "hub")
    load(source, Span(0, BLOCKS))
    assert source.fingerprint == open_source(str(local)).fingerprint
