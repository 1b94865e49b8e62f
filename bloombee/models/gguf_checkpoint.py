"""Checkpoints in one GGUF file: only the tensors asked for are dequantized."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from bloombee.errors import ModelError
from bloombee.models.checkpoint import Checkpoint, Identity
from bloombee.models.gguf_metadata import StoredTensor, read_metadata
from bloombee.models.hashing import sha256_of


class GGUFCheckpoint(Checkpoint):
    """A GGUF file; `name` is what the user called it."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self._path = self.gguf_path = path
        self._metadata = read_metadata(path)
        self.name = name or str(path)

    def config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self._metadata.folder)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._metadata.folder)

    def generation_config(self) -> GenerationConfig:
        return GenerationConfig.from_model_config(self.config())

    def has_tensor(self, name: str) -> bool:
        return self._stored_name(name) in self._metadata.tensors

    def tensors(
        self, names: Collection[str], *, progress: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        del progress  # nothing is fetched
        for name in names:
            stored = self._stored_name(name)
            yield name, self._read(stored, self._metadata.tensors[stored])

    def identity(self) -> Identity:
        # The file holds its config, so its hash is all there is to compare.
        return Identity({}, sha256_of({self._path.name: self._path}))

    def _read(self, name: str, stored: StoredTensor) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType(stored.kind)
        rows = gguf.quant_shape_to_byte_shape(stored.shape, kind)
        start, stop = stored.offset, stored.offset + stored.size_bytes
        if stop > len(self._bytes):
            raise ModelError(f"{self._path} is truncated: download it again")
        try:
            values = gguf.dequantize(self._bytes[start:stop].reshape(rows), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self._path} is quantized as {kind.name}, which the gguf package can't decode: "
                "choose another quantization"
            ) from None
        processed = self._processor.process(weights=values, name=name)
        return torch.from_numpy(np.require(processed.weights, requirements=("C", "W")))

    @cached_property
    def _bytes(self) -> np.ndarray:
        return np.memmap(self._path, mode="r", dtype=np.uint8)

    @cached_property
    def _processor(self) -> TensorProcessor:
        """Undoes what llama.cpp's converter does to some tensors, such as Llama's Q and K."""
        kind = TENSOR_PROCESSORS.get(self._metadata.architecture, TensorProcessor)
        return kind(config=self.config().to_dict())

    @cached_property
    def _name_map(self) -> gguf.TensorNameMap:
        wanted = self._metadata.architecture
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
        return gguf.get_tensor_name_map(arch, self.config().num_hidden_layers)

    def _stored_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        mapped = self._name_map.get_name(stem)
        return f"{mapped}.{suffix}" if mapped else name
