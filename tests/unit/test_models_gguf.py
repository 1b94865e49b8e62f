"""GGUF files that must not be served, and metadata that is converted once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from bloombee.errors import ModelError
from bloombee.models import gguf_metadata, open_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, *, scaling: str | None = None, extra: str | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    if scaling is not None:
        writer.add_string("llama.rope.scaling.type", scaling)
    for name in filter(None, ("output_norm.weight", extra)):
        writer.add_tensor(name, np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("scaling", "extra"), [("yarn", None), ("linear", None), (None, "rope_freqs.weight")]
)
def test_rotary_scaling_that_would_be_lost_is_refused(
    scaling: str | None, extra: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", scaling=scaling, extra=extra)
    with pytest.raises(ModelError, match="scales its rotary.*use the model's safetensors"):
        open_source(str(path))


def test_metadata_is_converted_once_and_never_left_half_done(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf")
    made: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        made.append(folder)
        header = {"architecture": "llama", "tensors": {}}
        (folder / gguf_metadata.HEADER).write_text(json.dumps(header))
        if len(made) == 1:
            raise ModelError("interrupted")

    monkeypatch.setattr(gguf_metadata, "_convert", convert)
    with pytest.raises(ModelError, match="interrupted"):
        gguf_metadata.read_metadata(path)
    assert not [entry for entry in cache.rglob("*") if entry.is_file()]
    first = gguf_metadata.read_metadata(path)
    assert gguf_metadata.read_metadata(path) == first
    assert len(made) == 2
    assert first.folder.is_relative_to(cache)


def test_a_cache_that_cannot_be_written_is_replaced_for_the_process(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf")
    cache.write_text("a file where the folder should be")
    header = '{"architecture": "llama", "tensors": {}}'
    monkeypatch.setattr(
        gguf_metadata, "_convert", lambda _, new: (new / "header.json").write_text(header)
    )
    first = gguf_metadata.read_metadata(path)
    assert not first.folder.is_relative_to(cache)
    assert gguf_metadata.read_metadata(path) == first
