"""Where a checkpoint's files are: a folder here, or a hub that fetches what is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from bloombee.errors import ModelError
from bloombee.models.hashing import sha256_of


class ModelFiles(ABC):
    """Files of one model by their relative names."""

    name: str

    @abstractmethod
    def metadata(self) -> Path:
        """A local folder with config, index and tokenizer files."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """Every file the model has, here or to be fetched."""

    @abstractmethod
    def fetch(self, names: Collection[str], *, progress: bool) -> None:
        """Make the named files local. Raises ModelError when one can't be had."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """Path of a fetched file."""

    @abstractmethod
    def sha256(self, names: Collection[str]) -> dict[str, str]:
        """SHA-256 of the named files, fetched or not. Raises ModelError when one is unknown."""


class FolderFiles(ModelFiles):
    """A folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = str(folder)

    def metadata(self) -> Path:
        return self._folder

    def names(self) -> Collection[str]:
        return {entry.name for entry in self._folder.iterdir() if entry.is_file()}

    def fetch(self, names: Collection[str], *, progress: bool) -> None:
        del progress
        missing = [name for name in names if not self.path(name).is_file()]
        if missing:
            raise ModelError(
                f"{self.name} lacks {', '.join(missing)}, which its index names: "
                "copy the file there, or give the hub id instead"
            )

    def path(self, name: str) -> Path:
        return self._folder / name

    def sha256(self, names: Collection[str]) -> dict[str, str]:
        self.fetch(names, progress=False)
        return sha256_of({name: self.path(name) for name in names})
