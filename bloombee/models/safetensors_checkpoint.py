"""Checkpoints in safetensors: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from bloombee.errors import ModelError
from bloombee.models.checkpoint import Checkpoint, Identity
from bloombee.models.files import ModelFiles

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsCheckpoint(Checkpoint):
    """A folder of config, tokenizer and safetensors, local or fetched file by file."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.name = files.name

    def weights_file(self) -> Path | None:
        files = self._folder_with_config().glob("*.safetensors")
        return max(files, key=lambda file: file.stat().st_size, default=None)

    def config(self) -> PreTrainedConfig:
        folder = self._folder_with_config()
        try:
            config = AutoConfig.from_pretrained(folder)
        except (ValueError, KeyError, OSError, StrictDataclassError) as error:
            raise ModelError(
                f"{self.name}: config.json can't be used: {_one_line(error)}: "
                "check that it is a causal language model of transformers"
            ) from None
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"{self.name} holds quantized weights, which are not served: "
                "use the original checkpoint or a GGUF file"
            )
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(self._folder_with_config())
        except (ValueError, KeyError, OSError) as error:
            raise ModelError(
                f"{self.name}: no usable tokenizer: {_one_line(error)}: "
                "put the model's tokenizer files beside its config.json"
            ) from None

    def generation_config(self) -> GenerationConfig:
        folder = self._folder_with_config()
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_model_config(self.config())

    def has_tensor(self, name: str) -> bool:
        return name in self._file_of

    def tensors(
        self, names: Collection[str], *, progress: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        self._files.fetch(sorted(by_file), progress=progress)
        for file, wanted in sorted(by_file.items()):
            yield from self._read(file, wanted)

    def identity(self) -> Identity:
        shards = sorted(set(self._index.values())) if self._index else [SINGLE]
        config = json.loads((self._folder_with_config() / "config.json").read_text())
        return Identity(config, self._files.sha256(shards))

    def _read(self, file: str, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        path = self._files.path(file)
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in names:
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} can't be read as safetensors: {_one_line(error)}: download it again"
            ) from None

    def _folder_with_config(self) -> Path:
        folder = self._files.metadata()
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{self.name} has no config.json: name a model folder in transformers' format, "
                "a GGUF file, a hub id or an alias"
            )
        return folder

    @cached_property
    def _index(self) -> dict[str, str] | None:
        """File by tensor name, for sharded checkpoints."""
        path = self._files.metadata() / INDEX
        if not path.is_file():
            return None
        try:
            index: dict[str, Any] = json.loads(path.read_text())
            return dict(index["weight_map"])
        except (ValueError, KeyError) as error:
            raise ModelError(f"{path} is broken ({error!r}): download it again") from None

    @cached_property
    def _file_of(self) -> dict[str, str]:
        if self._index is not None:
            return self._index
        names = self._files.names()
        if SINGLE not in names:
            raise self._no_weights(names)
        self._files.fetch([SINGLE], progress=True)
        path = self._files.path(SINGLE)
        try:
            with safe_open(path, framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), SINGLE)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} can't be read as safetensors: {_one_line(error)}: download it again"
            ) from None

    def _no_weights(self, names: Collection[str]) -> ModelError:
        if any(name.endswith(PICKLED) for name in names):
            return ModelError(
                f"{self.name} has only pickled weights, which can run code and are never loaded: "
                "convert it once with transformers' from_pretrained(...).save_pretrained(folder)"
            )
        return ModelError(f"{self.name} has no {SINGLE} and no {INDEX}: add the weights there")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
