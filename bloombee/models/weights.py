"""Fill modules of an outline with a checkpoint's tensors: only theirs, and only once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bloombee.errors import ModelError
from bloombee.models.source import ModelSource
from bloombee.telemetry import Progress


def fill(
    source: ModelSource,
    modules: Mapping[str, nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = True,
) -> None:
    """Give the modules (by path in the outline) their weights, in `dtype` on `device`.

    Modifies the modules; their parameters leave `meta`. Raises ModelError for missing
    or misshapen tensors.
    """
    wanted: dict[str, tuple[str, str]] = {}  # stored name -> module path, name inside it
    for path, module in modules.items():
        for inner in module.state_dict():
            full = f"{path}.{inner}"
            wanted[_stored_name(source, full)] = (path, inner)
    loaded: dict[str, dict[str, torch.Tensor]] = {path: {} for path in modules}
    with Progress("Loading weights", _size_bytes(modules, dtype), shown=progress) as bar:
        for stored, tensor in source.tensors(wanted, progress=progress):
            path, inner = wanted[stored]
            loaded[path][inner] = tensor.to(device, dtype, copy=True)
            bar.advance(tensor.numel() * dtype.itemsize)
    for path, module in modules.items():
        _assign(module, loaded.pop(path), source.name)


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor], model: str) -> None:
    for name, expected in module.state_dict().items():
        if tensors[name].shape != expected.shape:
            raise ModelError(
                f"{model}: {name} has shape {tuple(tensors[name].shape)}, its config asks for "
                f"{tuple(expected.shape)}: config.json and weights belong to different models"
            )
    module.load_state_dict(tensors, strict=True, assign=True)
    module.requires_grad_(requires_grad=False)


def _stored_name(source: ModelSource, name: str) -> str:
    """The checkpoint's name of a parameter: some were saved without the base model's prefix."""
    candidates = [name, name.removeprefix(f"{source.model_class.base_model_prefix}.")]
    for ours, stored in source.spec.stored_as.items():
        if name.startswith(f"{ours}."):
            candidates.append(stored + name.removeprefix(ours))
    for candidate in candidates:
        if source.has_tensor(candidate):
            return candidate
    raise ModelError(
        f"{source.name} has no tensor {name}: the checkpoint is incomplete, download it again"
    )


def _size_bytes(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> int:
    elements = sum(t.numel() for module in modules.values() for t in module.state_dict().values())
    return elements * dtype.itemsize
