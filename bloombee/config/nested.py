"""Records inside records, from a file: what is wrong is told in one line with the whole path."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from bloombee.config.base import Settings
from bloombee.config.validation import nearest
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

AnyRecord = TypeVar("AnyRecord", bound=Settings)


def validate_nested(model: type[AnyRecord], value: object, where: str) -> AnyRecord:
    """`value` as a `model`; raises SettingsError: `where`, the key, what is wrong with it."""
    try:
        return TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        # A misspelt key is also a missing one: the misspelling tells more.
        found = sorted(
            error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"
        )
        raise SettingsError(f"{where}{_told(model, found[0])}") from error


def _told(model: type[Settings], detail: ErrorDetails) -> str:
    """`: machines[1].device: is required` and the like."""
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]
    ).removeprefix(".")
    at = f": {place}" if place else ""
    if detail["type"] == "missing":
        return f"{at} is required"
    if detail["type"] == "too_short":
        context = detail.get("ctx", {})
        listed, least = context.get("actual_length"), context.get("min_length")
        return f"{at} lists {listed}: list at least {least}"
    if detail["type"] == "extra_forbidden":
        key = str(detail["loc"][-1])
        parent = at.removesuffix(key).rstrip(".: ")
        return f"{parent}: unknown key {key}{nearest(key, _keys(model, detail['loc'][:-1]))}"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    got = "" if detail["type"] == "value_error" else f", got {detail['input']!r}"
    return f"{at}: {message.partition(', unable to parse')[0]}{got if len(got) < 70 else ''}"


def _keys(model: type[Settings], place: tuple[int | str, ...]) -> list[str]:
    """The keys that exist in the record at `place`."""
    here = model
    for part in place:
        if isinstance(part, str):
            here = _inner(here, part)
    return [field.alias or name for name, field in here.model_fields.items()]


def _inner(model: type[Settings], key: str) -> type[Settings]:
    """The kind of record that a field holds, alone or many of."""
    annotation = model.model_fields[key].annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Settings):
            return kind
    return model
