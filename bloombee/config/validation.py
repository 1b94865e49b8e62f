"""What pydantic found wrong, told in one line that names the setting."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

SHOULD_BE = "Input should be "
SHOWN_CHARACTERS = 60


def explain(error: ValidationError, name: Callable[[str], str]) -> str:
    """The first thing wrong, as `NAME: what it should be, got what`.

    `name` turns a field's name into what the user wrote (a flag, a YAML key).
    """
    found = error.errors(include_url=False)
    first = found[0]
    if not first["loc"]:
        return _message(first)
    place = _place(first, name)
    if first["type"] == "missing":
        return f"{place} is required"
    # A union reports one error for each alternative.
    messages = [_message(detail) for detail in found if _place(detail, name) == place]
    expected = " or ".join(
        message if index == 0 else message.removeprefix("should be ")
        for index, message in enumerate(dict.fromkeys(messages))
    )
    return f"{place}: {expected}{_got(first)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` when a known word is close, else the list of known words."""
    words = sorted(known)
    close = get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(words)}"


def _message(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    if message.startswith(SHOULD_BE):
        message = "should be " + message.removeprefix(SHOULD_BE)
    return message.splitlines()[0].partition(", unable to parse")[0]


def _place(detail: ErrorDetails, name: Callable[[str], str]) -> str:
    """The field, and inside it the number of the item of a list."""
    if not detail["loc"]:
        return ""
    inner = [part for part in detail["loc"][1:] if isinstance(part, int)]
    return name(str(detail["loc"][0])) + "".join(f"[{index}]" for index in inner)


def _got(detail: ErrorDetails) -> str:
    shown = repr(detail["input"])
    if detail["type"] == "value_error" or len(shown) > SHOWN_CHARACTERS:
        return ""
    return f", got {shown}"
