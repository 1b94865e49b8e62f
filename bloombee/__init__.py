"""Serve one large language model from many machines.

`from bloombee import AutoDistributedModelForCausalLM` is the whole client API;
it is loaded on first use, so that `import bloombee` itself costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bloombee.client import AutoDistributedModelForCausalLM

__version__ = "0.1.0"

__all__ = ["AutoDistributedModelForCausalLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "AutoDistributedModelForCausalLM":
        raise AttributeError(f"module 'bloombee' has no attribute {name!r}")
    from bloombee.client import AutoDistributedModelForCausalLM

    return AutoDistributedModelForCausalLM
