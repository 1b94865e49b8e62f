"""Which dtype a model runs in on which device."""

from __future__ import annotations

import torch

from bloombee.errors import SettingsError
from bloombee.models.source import ModelSource

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, source: ModelSource, device: torch.device | str) -> torch.dtype:
    """`auto` is the checkpoint's own dtype, but float32 where the device computes float16 badly.

    Raises SettingsError for unknown names.
    """
    if name == "auto":
        native = source.native_dtype
        # CPUs lack float16 arithmetic; float32 holds every float16 value, bfloat16 does not.
        on_cpu = torch.device(device).type == "cpu"
        return torch.float32 if on_cpu and native is torch.float16 else native
    try:
        return DTYPES[name]
    except KeyError:
        known = ", ".join(("auto", *DTYPES))
        raise SettingsError(f"--dtype {name} is unknown: use one of {known}") from None
