"""Serve one large language model from many machines.

`from bloombee import AutoDistributedModelForCausalLM` (or `AsyncDistributedModelForCausalLM`,
for programs with an event loop) is the client; it is loaded on first use, so that
`import bloombee` itself costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bloombee.client import (
        AsyncDistributedModelForCausalLM,
        AutoDistributedModelForCausalLM,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncDistributedModelForCausalLM",
    "AutoDistributedModelForCausalLM",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bloombee' has no attribute {name!r}")
    from bloombee import client

    return getattr(client, name)
