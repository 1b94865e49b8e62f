"""The base of all settings and configuration files: frozen, and no unknown keys."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Validated once where it enters, never changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Flag:
    """How a setting appears on a command line; put into its `Annotated` type.

    A `positional` setting is an argument without a flag. Of a list setting beside
    a positional one, only arguments that match `item` belong to the list, so that
    `--initial-peers /ip4/... "prompt"` keeps its prompt.
    """

    metavar: str | None = None
    positional: bool = False
    item: str | None = None
