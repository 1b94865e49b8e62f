"""Checks tensor shapes at run time, and nothing else.

Types other than tensors are pyright's work; checked here as well, they would
refuse every fake and every Protocol that a test hands in.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_args

import jaxtyping
from beartype import beartype

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKED_PACKAGES = ["bloombee.kv", "bloombee.models", "bloombee.client", "bloombee.server"]


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checking the parameters and results that are annotated with shapes."""
    hints = function.__annotations__
    function.__annotations__ = {
        name: hint if _mentions_array(hint) else Any for name, hint in hints.items()
    }
    return beartype(function)


def _mentions_array(hint: object) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(_mentions_array(part) for part in get_args(hint))
