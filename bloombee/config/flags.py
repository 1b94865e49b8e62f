"""One setting, one place: a settings model becomes flags, YAML keys and help.

A field `num_blocks: int` of a `Settings` model is `--num-blocks N` on the command
line and `num_blocks: N` in the file that `--config` names; its description is the
help. Flags win over the file, the file wins over defaults.

1. `argparse` only splits the command line; every value stays text.
2. The file is read, its keys checked.
3. pydantic converts and validates the merged values, once, and its complaint is
   told in terms of the flag or the key that the user wrote.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from bloombee import __version__
from bloombee.config.base import Flag, Settings
from bloombee.config.files import check_keys, read_yaml
from bloombee.config.validation import explain, nearest
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic.fields import FieldInfo

AnySettings = TypeVar("AnySettings", bound=Settings)

USAGE_ERROR = 2
METAVARS: dict[object, str] = {int: "N", float: "X", Path: "FILE"}


def parse(
    model: type[AnySettings], argv: Sequence[str] | None = None, *, prog: str, description: str
) -> AnySettings:
    """The settings that a command line (default: this process's) asks for.

    Writes one line to standard error and exits with 2 when they are wrong; exits
    with 0 after `--help` and `--version`.
    """
    try:
        return read(model, sys.argv[1:] if argv is None else argv, prog, description)
    except SettingsError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(USAGE_ERROR) from error


def read(
    model: type[AnySettings], argv: Sequence[str], prog: str = "", description: str = ""
) -> AnySettings:
    """The same without the exit. Raises SettingsError for anything wrong."""
    settings = [_setting(field.alias or name, field) for name, field in model.model_fields.items()]
    parser = _parser(settings, prog, description)
    given = _given(parser, settings, argv)
    file: str | None = given.pop("config", None)
    values: dict[str, Any] = {}
    if file is not None:
        values = read_yaml(Path(file))
        check_keys(model, values, Path(file))
    words = {setting.name: setting.word for setting in settings}

    def written(name: str) -> str:
        return f"{file}: {name}" if name in values and name not in given else words[name]

    try:
        return model.model_validate({**values, **given})
    except ValidationError as error:
        raise SettingsError(explain(error, written)) from error


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    field: FieldInfo
    flag: Flag
    kinds: tuple[object, ...]
    """The alternatives of its type, without None."""

    @property
    def word(self) -> str:
        """What the user writes on the command line."""
        return self.name if self.flag.positional else "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) in (tuple, list) for kind in self.kinds)

    @property
    def metavar(self) -> str:
        choices = [str(c) for k in self.kinds if get_origin(k) is Literal for c in get_args(k)]
        named = [METAVARS[kind] for kind in self.kinds if kind in METAVARS]
        return self.flag.metavar or "|".join(named + choices) or self.name.upper()

    @property
    def help(self) -> str:
        text = self.field.description or ""
        default: object = self.field.get_default(call_default_factory=True)
        if self.field.is_required():
            text += " (required)"
        elif default is not None and default != () and not isinstance(default, bool):
            text += f" (default: {default})"
        return text.replace("%", "%%")


def _setting(name: str, field: FieldInfo) -> _Setting:
    marks: list[object] = [*field.metadata, *_marks(field.annotation)]
    flags = [mark for mark in marks if isinstance(mark, Flag)]
    return _Setting(name, field, flags[0] if flags else Flag(), _alternatives(field.annotation))


def _marks(annotation: object) -> list[object]:
    """What `Annotated` carries inside a union."""
    own: tuple[object, ...] = getattr(annotation, "__metadata__", ())
    return [*own, *(mark for part in get_args(annotation) for mark in _marks(part))]


def _alternatives(annotation: object) -> tuple[object, ...]:
    if get_origin(annotation) in (Union, UnionType):
        parts = get_args(annotation)
        return tuple(kind for part in parts for kind in _alternatives(part))
    if hasattr(annotation, "__metadata__"):  # Annotated inside a union
        return _alternatives(get_args(annotation)[0])
    return () if annotation is NoneType else (annotation,)


class _Parser(argparse.ArgumentParser):
    """Reports as an exception, in our words."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            raise SettingsError(re.sub(r"^argument (\S+?)(?:/\S+)?: ", r"\1: ", message))
        word = unknown[1]
        if not word.startswith("-"):
            raise SettingsError(f"unexpected argument {word!r}; see --help")
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = nearest(word.partition("=")[0], known) if len(word) > len("-h") else "; see --help"
        raise SettingsError(f"unknown flag {word}{hint}")


def _parser(settings: Sequence[_Setting], prog: str, description: str) -> _Parser:
    arguments = [
        setting.flag.metavar or setting.name for setting in settings if setting.flag.positional
    ]
    parser = _Parser(
        prog=prog or None,
        usage=" ".join(["%(prog)s [flags]", *arguments]),
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for setting in settings:
        _add(parser, setting)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these settings; flags win over it"
    )
    parser.add_argument(
        "--version", action="version", version=f"bloombee {__version__}", help="print it and exit"
    )
    return parser


def _add(parser: argparse.ArgumentParser, setting: _Setting) -> None:
    if setting.flag.positional:
        parser.add_argument(setting.name, nargs="?", metavar=setting.word, help=setting.help)
    elif setting.kinds == (bool,):
        parser.add_argument(setting.word, action=argparse.BooleanOptionalAction, help=setting.help)
    elif setting.is_list:
        parser.add_argument(
            setting.word, action="append", metavar=f"{setting.metavar} ...", help=setting.help
        )
    else:
        parser.add_argument(setting.word, metavar=setting.metavar, help=setting.help)


def _given(
    parser: argparse.ArgumentParser, settings: Sequence[_Setting], argv: Sequence[str]
) -> dict[str, Any]:
    """What the command line says, as text by setting; after `--` nothing is a flag."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    given = vars(parser.parse_intermixed_args(_spread_lists(argv[:end], settings)))
    free = [s.name for s in settings if s.flag.positional and s.name not in given]
    rest = argv[end + 1 :]
    if len(rest) > len(free):
        raise SettingsError(f"unexpected argument {rest[len(free)]!r}; see --help")
    return given | dict(zip(free, rest, strict=False))


def _spread_lists(argv: Sequence[str], settings: Sequence[_Setting]) -> list[str]:
    """`--peers A B C` as `--peers A --peers B --peers C`, so that argparse never takes too many."""
    has_positional = any(setting.flag.positional for setting in settings)
    lists = {setting.word: setting.flag.item for setting in settings if setting.is_list}
    spread: list[str] = []
    current: str | None = None
    taken = 0
    for word in argv:
        if word.startswith("-"):
            current, taken = (word, 0) if word in lists else (None, 0)
            spread.append(word)
            continue
        if current is not None and taken and has_positional:
            current = current if re.match(lists[current] or "", word) else None
        spread += [word] if current is None or not taken else [current, word]
        taken += 1
    return spread
