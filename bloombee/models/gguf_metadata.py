"""What a GGUF file says besides its weights, converted once to transformers' format.

Parsing a GGUF header takes seconds (every token of the vocabulary is a field), so the
config, the tokenizer and the table of tensors are kept in the user's cache folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gguf import GGUFReader
from transformers import AutoConfig, AutoTokenizer

from bloombee.errors import ModelError
from bloombee.models.cache_folder import cached_folder, file_key
from bloombee.telemetry import Progress

HEADER = "header.json"
# Bump when what is stored here changes.
VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie; `shape` as numpy has it, in elements."""

    kind: int
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """Architecture and tensors of a GGUF file; `folder` holds config.json and the tokenizer."""

    folder: Path
    architecture: str
    tensors: dict[str, StoredTensor]


def read_metadata(path: Path) -> GGUFMetadata:
    """Metadata of a GGUF file, converted on the first call. Raises ModelError for broken files."""
    folder = cached_folder(f"gguf{VERSION}", file_key(path), lambda new: _convert(path, new))
    header = json.loads((folder / HEADER).read_text())
    tensors = {
        name: StoredTensor(
            entry["kind"], tuple(entry["shape"]), entry["offset"], entry["size_bytes"]
        )
        for name, entry in header["tensors"].items()
    }
    return GGUFMetadata(folder, header["architecture"], tensors)


def _convert(path: Path, folder: Path) -> None:
    with Progress(f"Reading {path.name} for the first time", None):
        _write(path, folder)


def _write(path: Path, folder: Path) -> None:
    try:
        reader = GGUFReader(path)
        architecture = _text(reader, "general.architecture") or ""
        _refuse_unread_rotary(reader, architecture, path)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, IndexError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{path} can't be read as GGUF: {reason}: download it again, or use safetensors"
        ) from None
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    header = {"architecture": architecture, "tensors": _table(reader)}
    (folder / HEADER).write_text(json.dumps(header))


def _table(reader: GGUFReader) -> dict[str, dict[str, object]]:
    return {
        tensor.name: asdict(
            StoredTensor(
                int(tensor.tensor_type),
                tuple(int(size) for size in reversed(tensor.shape)),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
        )
        for tensor in reader.tensors
    }


def _refuse_unread_rotary(reader: GGUFReader, architecture: str, path: Path) -> None:
    """Transformers drops a GGUF file's rotary scaling: the tokens would be quietly wrong."""
    scaling = _text(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in _names(reader.tensors):
        raise ModelError(
            f"{path} scales its rotary embeddings, which transformers can't read from GGUF: "
            "use the model's safetensors"
        )


def _names(tensors: Iterable[object]) -> set[str]:
    return {str(getattr(tensor, "name", "")) for tensor in tensors}


def _text(reader: GGUFReader, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())
