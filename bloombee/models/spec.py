"""Family specs: one YAML file says where a family's parts live in its transformers model.

A new family whose attention goes through transformers' attention interface is a
new file in `configs/models/`, and no code.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bloombee.errors import ModelError

T = TypeVar("T")

ALIASES_FILE = "aliases.yaml"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parts(_Strict):
    """Dotted paths of the parts in the transformers `...ForCausalLM` model."""

    embed: str
    blocks: str
    norm: str
    head: str
    rotary: str | None = None
    position_table: str | None = None
    project_in: str | None = None
    project_out: str | None = None


class LayerArguments(_Strict):
    """Names of the keyword arguments through which a layer takes what it needs."""

    positions: str | None = None
    rotary: str | None = None


class GatedLayers(_Strict):
    """What sets a Llama-like family's layers apart, for the hand-written ones.

    `window`: dotted path, from the attention module, of its sliding window.
    `head_norms`: queries and keys are normalised per head.
    """

    window: str | None = None
    head_norms: bool = False


class FamilySpec(_Strict):
    """How one family of models runs packed.

    `positions`: `rotary` (cosines and sines handed to each layer) or `learned` (a table
    added to the embeddings; position p is its row `p + position_offset`). `attention`:
    `interface` means that the layers call transformers' attention interface. `stored_as`:
    names of parts in checkpoints, where they differ from those in the model. `gated`: the
    hand-written layers take the place of transformers'.
    """

    family: str
    model_types: tuple[str, ...] = Field(min_length=1)
    parts: Parts
    positions: Literal["rotary", "learned"]
    position_offset: int = 0
    layer_arguments: LayerArguments = LayerArguments()
    stored_as: dict[str, str] = Field(default_factory=dict)
    attention: Literal["interface"]
    gated: GatedLayers | None = None


class Alias(_Strict):
    """What a short model name stands for: a hub repository, or a GGUF in a Python package."""

    hub: str | None = None
    wheel: str | None = None
    revision: str | None = None


def configs_folder() -> Traversable:
    """`configs/models`: inside the installed package, or beside it in a checkout."""
    installed = resources.files("bloombee") / "_configs" / "models"
    if installed.is_dir():
        return installed
    return Path(__file__).resolve().parents[2] / "configs" / "models"


@cache
def families() -> dict[str, FamilySpec]:
    """Every family spec by transformers `model_type`. Raises ModelError for a broken file."""
    specs: dict[str, FamilySpec] = {}
    files = sorted(configs_folder().iterdir(), key=lambda file: file.name)
    for file in files:
        if file.name.endswith(".yaml") and file.name != ALIASES_FILE:
            spec = _parse(file, TypeAdapter(FamilySpec))
            specs |= dict.fromkeys(spec.model_types, spec)
    return specs


@cache
def aliases() -> dict[str, Alias]:
    """Short model names. Raises ModelError for a broken file."""
    return _parse(configs_folder() / ALIASES_FILE, TypeAdapter(dict[str, Alias]))


def family_of(model_type: str, model: str) -> FamilySpec:
    """The spec for a transformers `model_type`. Raises ModelError when no family has it."""
    spec = families().get(model_type)
    if spec is None:
        known = ", ".join(sorted(families()))
        raise ModelError(
            f"{model} is a {model_type!r} model, which no family spec covers: use one of {known}, "
            f"or add configs/models/{model_type}.yaml"
        )
    return spec


def _parse(file: Traversable, adapter: TypeAdapter[T]) -> T:
    try:
        return adapter.validate_python(yaml.safe_load(file.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelError(f"{file}: {where}: {first['msg']}: correct the file") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} is not YAML: {reason}: correct the file") from None
