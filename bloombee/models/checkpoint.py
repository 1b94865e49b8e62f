"""What every kind of checkpoint offers: its config, its tensors by name, its identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two checkpoints the same model: raw config, and SHA-256 by weight file."""

    config: dict[str, Any]
    weight_sha256: dict[str, str]


class Checkpoint(ABC):
    """One model on disk or on a hub. Reading raises ModelError in one line."""

    name: str
    gguf_path: Path | None = None

    def weights_file(self) -> Path | None:
        """A local file of weights, the largest; None where none is here."""
        return self.gguf_path

    @abstractmethod
    def config(self) -> PreTrainedConfig:
        """The model's transformers config."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    @abstractmethod
    def generation_config(self) -> GenerationConfig:
        """The model's generation settings, from its config when it has no own file."""

    @abstractmethod
    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor for the parameter that transformers calls `name`."""

    @abstractmethod
    def tensors(
        self, names: Collection[str], *, progress: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the named tensors (all exist), fetching only the files that hold them.

        They come in the stored dtype, or float32 where the stored type is quantized, and
        may share memory with the file: copy what is kept.
        """

    @abstractmethod
    def identity(self) -> Identity:
        """Config and weight hashes of the whole model, whatever part is on disk."""
