"""The files of `configs/`, found and read: where they lie, YAML, validation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from bloombee.config.validation import explain, nearest
from bloombee.errors import SettingsError

PACKAGE = Path(__file__).resolve().parent.parent
INTEGER_TAG = "tag:yaml.org,2002:int"
INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")

AnyModel = TypeVar("AnyModel", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe YAML without two traps of version 1.1.

    `10:20` stays text (1.1 reads 620, in base 60), and a repeated key is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 (PyYAML's)
        """Raises a YAML error where a key appears twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} appears twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != INTEGER_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for first in "-+0123456789":
    _Loader.yaml_implicit_resolvers.setdefault(first, []).append((INTEGER_TAG, INTEGER))


def config_path(*parts: str) -> Path:
    """The path of a file or folder of `configs/`, e.g. `config_path("models", "aliases.yaml")`.

    A wheel carries them inside the package, a checkout beside it. The path may
    not exist: the caller knows what its absence means.
    """
    installed = PACKAGE / "_configs"
    root = installed if installed.is_dir() else PACKAGE.parent / "configs"
    return root.joinpath(*parts)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises SettingsError when the file can't be read, is no YAML, or holds no mapping.
    """
    try:
        content: object = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise SettingsError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is no text file in UTF-8") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}{_yaml_problem(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: should hold `key: value` lines, not a {_kind(content)}")
    mapping = cast("dict[object, Any]", content)
    return {str(key): value for key, value in mapping.items()}


def read_settings(model: type[AnyModel], path: Path) -> AnyModel:
    """One validated `model` from a YAML file.

    Raises SettingsError that names the file, the key and what is wrong with it.
    """
    values = read_yaml(path)
    check_keys(model, values, path)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SettingsError(f"{path}: {explain(error, str)}") from error


def check_keys(model: type[BaseModel], values: dict[str, Any], path: Path) -> None:
    """Raises SettingsError for a key that `model` doesn't have, naming the nearest it has."""
    known = [field.alias or name for name, field in model.model_fields.items()]
    for key in values:
        if key not in known:
            raise SettingsError(f"{path}: unknown key {key}{nearest(key, known)}")


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f":{error.problem_mark.line + 1}: {error.problem or 'not valid YAML'}"
    return ": not valid YAML"


def _kind(content: object) -> str:
    return "list" if isinstance(content, list) else "single value"
